"""`muster predict`: exchanges from a profile or a link, their warnings, and what is wrong on the command line."""

import json
from pathlib import Path

import pytest

from muster.collectives_bench.catalog import OPERATIONS
from muster.collectives_bench.cost.fit import fit
from muster.collectives_bench.cost.profile import save
from muster.collectives_bench.sizes import parse_sizes
from muster.jobs.basics.errors import UsageError
from muster.launch import cli
from muster.launch.bench.source import parse_rate, parse_time
from support.costs import OnLinks, OnOneHost, drawn

pytestmark = pytest.mark.command

MB = 2**20


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A profile of a drawn cluster: worlds of 2 and 3 ranks on one node."""
    path = tmp_path_factory.mktemp("profile") / "p.json"
    save(fit(drawn(OnOneHost, ("all_reduce", "broadcast", "barrier"), worlds=(2, 3), noise=0.0)), path)
    return str(path)


def predicted(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, object]]:
    assert cli.main(["predict", *argv, "--json"]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def test_eight_ranks_need_2_8_seconds_for_ten_billion_fp16_gradients_at_100_gbit(capsys) -> None:
    argv = ("--link", "100Gbit", "--op", "all_reduce", "--bytes", "20e9", "--world", "8")
    [found] = predicted(capsys, *argv)
    assert found["seconds"] == pytest.approx(2.8)
    assert found["busbw"] == pytest.approx(12.5)
    assert cli.main(["predict", *argv]) == 0
    assert " 2.8 s " in capsys.readouterr().out


def test_a_ring_has_its_steps_bytes_and_formula_with_the_numbers(profile: str, capsys) -> None:
    argv = ("--link", "100Gbit", "--latency", "50us", "--op", "all_reduce,all_gather,barrier", "--bytes", "20e9")
    both, half, none = (each["ring"] for each in predicted(capsys, *argv, "--world", "8"))
    assert (both["steps"], both["bytes_per_rank"], both["bandwidth"]) == (14, 35e9, pytest.approx(12.5e9))
    assert (half["steps"], half["bytes_per_rank"], none) == (7, 17.5e9, None)
    assert both["seconds"] == pytest.approx(14 * 50e-6 + 35e9 / 12.5e9)
    assert [each["ring"] for each in predicted(capsys, *argv, "--world", "1")] == [None, None, None]
    assert cli.main(["predict", *argv, "--world", "8"]) == 0
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "all_reduce as a ring: 2 (N - 1) = 14 steps; a rank sends 2 (N - 1) / N X = 2 x 7 / 8 x 20e9 = 35e9 bytes",
        "  t = steps x latency + bytes / bandwidth = 14 x 50 us + 35e9 / 12.5e9 = 2.801 s",
        "all_gather as a ring: N - 1 = 7 steps; a rank sends (N - 1) / N X = 7 / 8 x 20e9 = 17.5e9 bytes",
        "  t = steps x latency + bytes / bandwidth = 7 x 50 us + 17.5e9 / 12.5e9 = 1.4 s",
    ]
    argv = ("--profile", profile, "--op", "all_reduce", "--bytes", "1M,2M,4M,8M,16M", "--world", "2")
    assert cli.main(["predict", *argv]) == 0
    *_, last, more = capsys.readouterr().out.splitlines()
    assert "= 2 x 1 / 2 x 8.38861e6 = 8.38861e6 bytes; in " in last
    assert more == "1 more ring: --json lists the steps and bytes of all"


def test_a_latency_counts_once_a_step(capsys) -> None:
    [found] = predicted(capsys, *("--link", "1Gbit", "--latency", "50us", "--op", "barrier", "--world", "8"))
    assert found["seconds"] == pytest.approx(150e-6)


def test_ranks_behind_a_link_are_on_a_node_each_unless_it_is_said(capsys) -> None:
    argv = ("--link", "1Gbit", "--op", "all_reduce", "--bytes", "1M", "--world", "8")
    [alone], [shared] = predicted(capsys, *argv), predicted(capsys, *argv, "--nodes", "2")
    assert (alone["nodes"], shared["nodes"]) == (8, 2)


def test_all_and_ours_stand_for_their_operations_as_in_bench(capsys) -> None:
    argv = ("--link", "1Gbit", "--bytes", "1M", "--world", "4", "--op")
    names = {word: [each["operation"] for each in predicted(capsys, *argv, word)] for word in ("all", "ours")}
    assert names["all"] == [name for name, each in OPERATIONS.items() if not each.ours]
    assert names["ours"] == [name for name, each in OPERATIONS.items() if each.ours]
    both = [each["operation"] for each in predicted(capsys, *argv, "barrier, all")]
    assert both == ["barrier", *(name for name in names["all"] if name != "barrier")]


def test_every_operation_size_and_world_is_a_row(profile: str, capsys) -> None:
    argv = ("--profile", profile, "--op", "all_reduce,barrier", "--bytes", "1MB,10MB", "--world", "1,2,4")
    found = predicted(capsys, *argv)
    assert [(each["operation"], each["ranks"], each["bytes"]) for each in found] == [
        *(("all_reduce", ranks, size * MB) for ranks in (1, 2, 4) for size in (1, 10)),
        *(("barrier", ranks, 0) for ranks in (1, 2, 4)),
    ]
    assert found[0]["seconds"] == 0
    assert found[2]["how"] == "measured at this size"
    assert found[5]["how"] == "formula, fitted on worlds 2, 3"
    assert found[5]["seconds"] == pytest.approx(OnOneHost.of("all_reduce", 10 * MB, ranks=4, nodes=1), rel=0.1)
    assert all(each["low_s"] <= each["seconds"] <= each["high_s"] for each in found)


def test_warnings_stand_below_the_table_once(profile: str, capsys) -> None:
    argv = ["predict", "--profile", profile, "--op", "all_reduce", "--bytes", "1G,2G", "--world", "2"]
    assert cli.main([*argv, "--dtype", "bf16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("warning")] == [
        "warning: bf16 was not measured: the time is for the same number of bytes of fp32",
        "warning: 1 GB is more than 4 times the largest size measured, 64 MB",
        "warning: 2 GB is more than 4 times the largest size measured, 64 MB",
    ]


def test_nodes_are_as_they_were_measured_unless_given(tmp_path: Path, capsys) -> None:
    save(fit(drawn(OnLinks, ("all_reduce",), noise=0.0)), tmp_path / "p.json")
    argv = ("--profile", str(tmp_path / "p.json"), "--op", "all_reduce", "--bytes", "10MB", "--world", "8")
    [usual], [given] = predicted(capsys, *argv), predicted(capsys, *argv, "--nodes", "4")
    assert (usual["nodes"], given["nodes"]) == (8, 4)


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--op", "all_reduce", "--bytes", "1M", "--world", "2"], 2, "give either --profile"),
        (["--profile", "P", "--link", "1Gbit", "--op", "barrier", "--world", "2"], 2, "give either --profile"),
        (["--profile", "P", "--latency", "1us", "--op", "barrier", "--world", "2"], 2, "belongs to --link"),
        (["--profile", "P"], 2, "--op is missing"),
        (["--profile", "P", "--op", "barrier"], 2, "--world is missing"),
        (["--profile", "P", "--op", "all_reduce", "--world", "2"], 2, "--bytes is missing"),
        (["--profile", "P", "--op", "all_reduce", "--bytes", "many", "--world", "2"], 2, "not a size: 'many'"),
        (["--profile", "P", "--op", "all_reduce", "--bytes", "1M", "--world", "two"], 2, "must be numbers of ranks"),
        (["--profile", "P", "--op", "all_reduc", "--bytes", "1M", "--world", "2"], 2, "did you mean 'all_reduce'"),
        (["--profile", "P", "--op", "barrier", "--world", "4", "--nodes", "0"], 2, "--nodes 0: must be a whole number"),
        (["--profile", "P", "--op", "barrier", "--world", "4", "--nodes", "-1"], 2, "--nodes -1: must be a whole"),
        (["--profile", "P", "--op", "barrier,", "--world", "4"], 2, "a name is empty"),
        (["--profile", "P", "--op", "barrier", "--world", "4", "--nodes", "3"], 2, "cannot be divided evenly"),
        (["--profile", "P", "--op", "barrier", "--world", "4", "--nodes", "4"], 78, "only with 2 ranks on 1"),
        (["--profile", "P", "--op", "barrier", "--world", "2", "--backend", "nccl"], 78, "only with gloo"),
        (["--profile", "none.json", "--op", "barrier", "--world", "2"], 2, "none.json: cannot be read"),
        (["--profile", __file__, "--op", "barrier", "--world", "2"], 65, "not JSON"),
        (["--link", "fast", "--op", "barrier", "--world", "2"], 2, "expected bits per second"),
        (["JOB.yaml", "--profile", "P", "--op", "barrier", "--world", "2"], 2, "leave one out"),
        (["JOB.yaml", "--profile", "P", "--bytes", "1M"], 2, "--bytes 1M: is for exchanges"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(profile: str, argv: list[str], code: int, says: str, capsys) -> None:
    assert cli.main(["predict", *(profile if word == "P" else word for word in argv)]) == code
    [line] = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize(
    ("word", "sizes"),
    [("36.9MB", [38692454]), ("20e9", [20 * 10**9]), ("1.5e3", [1500]), ("1M:4M", [MB, 2 * MB, 4 * MB])],
)
def test_sizes_are_those_of_the_benchmark_or_plain_numbers(word: str, sizes: list[int]) -> None:
    assert parse_sizes(word) == sizes


def test_rates_and_times_have_units() -> None:
    assert [parse_rate(text) for text in ("100Gbit", "8mbit/s", "2.5 kbit", "9600bit")] == [
        100e9,
        8e6,
        2500,
        9600,
    ]
    assert [parse_time(text) for text in ("50us", "0.2ms", "3", "1 s", "7ns")] == pytest.approx(
        [5e-5, 2e-4, 3, 1, 7e-9]
    )
    for wrong in ("100", "0Gbit", "-1Gbit", "100GB"):
        with pytest.raises(UsageError):
            parse_rate(wrong)
    with pytest.raises(UsageError):
        parse_time("soon")
