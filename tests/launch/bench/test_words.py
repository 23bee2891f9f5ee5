"""The command line of `muster bench`: what it stands for, and what is wrong with it before anything starts."""

import argparse
from typing import Any

import pytest

from muster.jobs.basics.errors import UsageError
from muster.jobs.spec.load import load_job
from muster.launch.bench import choices, words
from muster.launch.bench.words import changes, job_text, operations, overrides, worlds
from muster.launch.common.kinds import KINDS


def parsed(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    words.add_choices(parser)
    return vars(parser.parse_args(arguments))


def changed(*arguments: str) -> dict[str, Any]:
    return changes(parsed(*arguments))


def grid(*arguments: str) -> list[Any]:
    given = parsed(*arguments)
    return worlds(given["nodes"], given["ranks_per_node"])


def test_options_are_settings_with_the_types_of_the_job_file() -> None:
    given = "--sizes 512K:2M,8 --dtype fp32,bf16 --place both --call sync,async --backend gloo --device cpu"
    more = "--launches 2 --block-s 0.1 --timeout-s 5 --seed 7 --pair-size 1M --wire --no-check --pairs"
    assert changed(*given.split(), *more.split()) == {
        "sizes": [8, 512 << 10, 1 << 20, 2 << 20],
        "dtypes": ["fp32", "bf16"],
        "places": "both",
        "calls": ["sync", "async"],
        "backend": "gloo",
        "device": "cpu",
        "launches": 2,
        "block_s": 0.1,
        "timeout_s": 5.0,
        "seed": 7,
        "pair_bytes": 1 << 20,
        "wire": True,
        "pairs": True,
        "check": False,
    }
    assert changed() == {}
    assert changed("--sizes", "1e3,2E6") == {"sizes": [1000, 2_000_000]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--sizes 5Q", "--sizes: not a size: '5Q'; write bytes"),
        ("--sizes 1G:1M", "--sizes: '1G:1M': the range ends below its start"),
        ("--sizes 0", "--sizes: size 0: must be from 1 byte to 64G"),
        ("--dtype fp33", "--dtype: must be 'fp32', 'bf16', 'fp16' or 'int32', got 'fp33'; did you mean 'fp32'?"),
        ("--place inn", "--place: must be 'default', 'in', 'out' or 'both', got 'inn'; did you mean 'in'?"),
        ("--launches 0", "--launches: must be at least 1, got 0"),
        ("--launches x", "--launches: must be a whole number, got 'x'"),
        ("--block-s soon", "--block-s: must be a number, got 'soon'"),
        ("--backend nccl --device cpu", "nccl supports only GPUs"),
    ],
)
def test_a_wrong_option_is_a_usage_error_that_names_it(arguments: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        changed(*arguments.split())
    assert message in str(raised.value)


def test_all_wrong_options_are_told_at_once() -> None:
    with pytest.raises(UsageError) as raised:
        changed("--sizes", "5Q", "--launches", "0", "--dtype", "x")
    assert [line.partition(":")[0] for line in str(raised.value).splitlines()] == ["--sizes", "--dtype", "--launches"]


def test_a_grid_is_the_product_with_ranks_running_fastest() -> None:
    assert grid("-N", "1,2", "-n", "1,slots") == [(1, 1), (1, "slots"), (2, 1), (2, "slots")]
    assert grid() == [(None, None)]
    assert grid("--nodes", "4") == [(4, None)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-N 0", "--nodes 0: must be a whole number from 1, or several separated by commas, got '0'"),
        ("-N 1,,2", "got ''"),
        ("-n 1,cores", "--ranks-per-node 1,cores: must be a whole number from 1 or slots"),
        ("-N 2,1,2", "--nodes 2,1,2: 2 is given twice"),
    ],
)
def test_a_wrong_grid_is_a_usage_error(arguments: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        grid(*arguments.split())
    assert message in str(raised.value)


def test_operations_are_names_of_the_catalog() -> None:
    assert operations("broadcast, reduce,broadcast") == ["broadcast", "reduce"]
    with pytest.raises(UsageError, match=r"unknown operation 'al_reduce'; did you mean 'all_reduce'\? \(valid: all,"):
        operations("al_reduce")
    with pytest.raises(UsageError, match="all_reduce,: a name is empty"):
        operations("all_reduce,")
    with pytest.raises(UsageError, match="hello: it measures nothing"):
        operations("hello")


def test_a_word_is_a_job_file_by_its_ending_its_slash_or_its_being_there(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job").touch()
    assert [words.is_file(word) for word in ("b.yaml", "b.yml", "./b", "job", "all_reduce")] == [True] * 4 + [False]


def test_a_job_is_made_of_the_command_line_and_named_after_its_operations(tmp_path) -> None:
    text = job_text(["all_reduce", "barrier"], {"sizes": [8, 1024], "wire": True}, 2, "slots")
    job = load_job(tmp_path / "none", KINDS, text=text).job
    assert (job.name, job.nodes, job.ranks_per_node) == ("bench-all_reduce-barrier", 2, "slots")
    settings = job.settings.model_dump()
    assert (settings["operation"], settings["sizes"], settings["wire"]) == (["all_reduce", "barrier"], [8, 1024], True)
    assert load_job(tmp_path / "none", KINDS, text=job_text(["all"], {"pairs": True}, 2, 1)).job.name == "bench-pairs"


def test_settings_over_a_job_file_are_spelt_as_overrides_that_read_back_the_same(tmp_path) -> None:
    settings = {"sizes": [8, 1024], "places": "both", "check": False, "block_s": 0.1, "dtypes": ["bf16"]}
    job = load_job(tmp_path / "none", KINDS, overrides(settings), text="bench: {operation: [all_reduce]}").job
    assert {name: job.settings.model_dump()[name] for name in settings} == settings


@pytest.mark.parametrize(
    ("given", "message"),
    [("x.gif", "must end in .png or .svg or .pdf"), ("none/x.png", "no such folder: none"), ("d.png", "is a folder")],
)
def test_a_file_that_could_not_be_written_is_refused_before_anything_starts(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.png").mkdir()
    with pytest.raises(UsageError, match=message):
        choices.check_output("--plot", given, choices.PLOTS)
    choices.check_output("--plot", None, choices.PLOTS)
    choices.check_output("--plot", "x.svg", choices.PLOTS)
