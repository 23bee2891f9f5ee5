"""`muster profile`: the ranks side by side, what is said where there is none, and files of other nodes."""

import json
from pathlib import Path

import pytest

from muster.jobs.basics.files import append_lines, write_json
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.trace.events import read_trace
from muster.jobs.trace.nesting import nest_trace
from muster.jobs.trace.record import record_of
from muster.launch import cli
from muster.launch.common.storage import Courier, files_of, keep
from muster.launch.look.profiles import read_flame, read_profiles
from support.traces import kernels, lane, steps

FACTS = {"world_size": 3, "attempt": 0, "host": "n1", "mode": "bucketed", "device": "cpu", "steps_of_job": 9}


def profiled(run: RunDir, rank: int, *, attempt: int = 0, forward_s: float = 0.2, cuda: bool = False) -> None:
    """Leave a rank's profile of steps 6 and 7, half of whose communication is hidden, and its metrics."""
    made = [
        *steps("fbbco fbbco", first=6),
        *lane("cpu_op", "aten::mm", "###........", 1),
        *lane("user_annotation", "gloo:all_reduce", "..##.......", 7),
        *(kernels("gemm_kernel", "..##.......", "x..........", stream=7, first=1) if cuda else []),
    ]
    facts = {**FACTS, "rank": rank, "memory": {"host_peak_bytes": 300 * 2**20}, "files": ["flame.svg"]}
    paths = run.attempt(attempt).profile(rank)
    paths.path.mkdir(parents=True)
    write_json(paths.record, record_of(nest_trace(read_trace(made)), facts))
    rows = [
        {"step": step, "profile": word, "forward_s": forward_s, "communication_s": 0.1, "backward_s": 0.3}
        for step, word in ((5, "warm-up"), (6, "recorded"), (7, "recorded"))
    ]
    append_lines(run.attempt(attempt).metrics(rank), rows)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of two attempts, the second of which was not profiled."""
    made = RunDir(tmp_path / "run-20260101T000000.000Z-abcdef")
    for attempt in range(2):
        made.attempt(attempt).path.mkdir(parents=True)
    made.events.touch()
    return made


def shown(run: RunDir, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["profile", str(run.path), *arguments]) == 0
    return capsys.readouterr().out


def test_the_slowest_rank_comes_first_and_is_told_more_of(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, forward_s in enumerate((0.2, 0.5, 0.3)):
        profiled(run, rank, forward_s=forward_s)
    text = shown(run, capsys)
    assert text.splitlines()[0].endswith("attempt 0: steps 6-7 of 9, mode bucketed, 3 ranks on cpu")
    table = [line.split() for line in text.splitlines()[3:6]]
    assert [row[0] for row in table] == ["1", "2", "0"]
    assert table[0] == [
        "1",
        "900.0",
        "800.0",
        "0.0",
        "500.0",
        "300.0",
        "100.0",
        "0.0",
        "0.0",
        "0.50",
        "100%",
        "300",
        "MB",
    ]
    assert "rank 1 on n1, step by step" in text
    assert "computing time of its threads by kind: matmul 100%" in text
    assert "flame.svg" in text
    assert "trace.json.gz" not in text  # not among the files that the rank wrote
    assert "rank 0 on n1" in shown(run, capsys, "--rank", "0,2")


def test_the_newest_attempt_with_a_profile_is_shown_and_any_may_be_asked_for(run: RunDir) -> None:
    profiled(run, 0)
    assert read_profiles(run, None)[0] == 0
    profiled(run, 0, attempt=1)
    assert read_profiles(run, None)[0] == 1
    assert read_profiles(run, 0)[0] == 0


def test_as_json_it_has_records_breakdowns_and_paths(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    profiled(run, 0, cuda=True)
    told = json.loads(shown(run, capsys, "--json"))
    (rank,) = told["ranks"]
    assert (told["attempt"], rank["overlap"], rank["own_s"]) == (0, None, pytest.approx(0.5))
    assert rank["breakdown"] == {
        "data": 0.0,
        "optimizer": 0.0,
        "communication": pytest.approx(0.1),
        "forward": pytest.approx(0.2),
        "backward": pytest.approx(0.3),
    }
    assert [row["name"] for row in rank["kernels"]] == ["gemm_kernel"]
    assert Path(rank["path"]) == run.attempt(0).profile(0).path


def test_where_the_metrics_are_not_the_trace_s_own_phases_stand_in(run: RunDir) -> None:
    profiled(run, 0)
    run.attempt(0).metrics(0).unlink()
    assert read_profiles(run, None)[1][0].breakdown["backward"] == pytest.approx(20e-6)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 72, "no rank has written a profile; set train.profile: true"),
        (("--attempt", "1"), 72, "attempt 1 of run-"),
        (("--attempt", "-1"), 2, "--attempt: must be at least 0, got -1"),
    ],
)
def test_without_a_profile_it_says_how_to_have_one(run: RunDir, capsys, arguments, code: int, message: str) -> None:
    assert cli.main(["profile", str(run.path), *arguments]) == code
    assert message in capsys.readouterr().err


def test_a_rank_without_a_profile_is_named(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    profiled(run, 0)
    assert cli.main(["profile", str(run.path), "--rank", "0-2"]) == 72
    assert "nothing is recorded for rank 1-2; recorded ranks: 0" in capsys.readouterr().err
    assert cli.main(["profile", str(run.path), "--rank", "7"]) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": 0}'])
def test_a_torn_record_is_no_profile(run: RunDir, capsys: pytest.CaptureFixture[str], text: str) -> None:
    profiled(run, 0)
    profiled(run, 1)
    run.attempt(0).profile(1).record.write_text(text)
    assert [each.rank for each in read_profiles(run, None)[1]] == [0]


HOSTILE = "<script>alert(1)</script>\x1b]0;owned\x07"
ALLOCATION = {"bytes": 2**21, "operator": HOSTILE, "module": HOSTILE, "step": 6, "alive_s": 0.5}
SEEN = {
    "modules": {"mlp": 0.3, "norm": 0.1},
    "memory_over_time": [[0.0, 2**20], [0.25, 2**22], [0.5, 0]],
    "allocations": [ALLOCATION],
}


def change(run: RunDir, **changes: object) -> None:
    path = run.attempt(0).profile(0).record
    write_json(path, json.loads(path.read_text()) | changes)


def test_modules_and_the_largest_allocations_are_shown(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    profiled(run, 0)
    assert "by kind of module" not in shown(run, capsys)  # a profile of an older version
    change(run, **SEEN)
    lines = shown(run, capsys).splitlines()
    assert [line.split() for line in lines if line.startswith(("mlp", "norm"))] == [
        ["mlp", "150.0", "75.0%"],
        ["norm", "50.0", "25.0%"],
    ]
    title = "peak of tensors: 4.0 MB, 250.0 ms after the first recorded step began; the largest:"
    row = lines[lines.index(title) + 2]
    assert row.split()[:3] == ["2.0", "6", "500.0"]
    assert r"<script>alert(1)</script>\x1b]0;owned\x07" in row
    change(run, modules_note="module kinds are unknown: compiled")
    assert "\nmodule kinds are unknown: compiled\n" in shown(run, capsys)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("modules", {"mlp": "x"}),
        ("modules_note", 7),
        ("memory_over_time", [[0.0, 1.0]] * 2001),
        ("memory_over_time", [[0.0, 1.0, 2.0]]),
        ("memory_over_time", {}),
        ("allocations", [ALLOCATION] * 21),
        ("allocations", [{**ALLOCATION, "bytes": 1e400}]),
        ("allocations", [{}]),
    ],
)
def test_what_is_damaged_is_left_out_and_named(run: RunDir, capsys, key: str, value: object) -> None:
    profiled(run, 0)
    change(run, **{**SEEN, key: value})
    (profile,) = read_profiles(run, None)[1]
    assert profile.left_out == (key,)
    assert key not in profile.record
    assert f"left out, because the record is damaged: {key}" in shown(run, capsys)


def flame(run: RunDir, rows: object) -> list[tuple]:
    profiled(run, 0)
    (profile,) = read_profiles(run, None)[1]
    write_json(run.attempt(0).profile(0).flame_data, {"version": 1, "frames": rows, "left_out": 0})
    return [tuple(frame) for frame in read_flame(profile)]


def test_frames_of_a_flame_graph_lie_within_their_parents(run: RunDir) -> None:
    rows = [[0, "all", "other", 10.0, 1], [1, "a", "other", 6.0, 1], [2, HOSTILE, "", 6.5, 2], [1, "b", "", 4, 1]]
    assert flame(run, rows) == [
        (0, "all", "other", 0.0, 10.0, 1),
        (1, "a", "other", 0.0, 6.0, 1),
        (2, HOSTILE, "", 0.0, 6.0, 2),
        (1, "b", "", 6.0, 4.0, 1),
    ]
    assert read_flame(read_profiles(run, None)[1][0], device=True) == ()


@pytest.mark.parametrize(
    "rows",
    [
        None,
        7,
        [],
        [[1, "a", "", 1.0, 1]],
        [[0, "all", "", 1.0, 1], [2, "a", "", 1.0, 1]],
        [[0, "all", "", 1.0, 1], [0, "again", "", 1.0, 1]],
        [[0, "all", "", -1.0, 1]],
        [[0, "all", "", "1", 1]],
        [[0, 7, "", 1.0, 1]],
        [[0, "all", "", 1.0]],
        [[0, "all", "", 1.0, 1], [-1, "a", "", 1.0, 1]],
    ],
)
def test_a_damaged_flame_graph_is_none(run: RunDir, rows: object) -> None:
    assert flame(run, rows) == []


def test_profiles_of_a_node_with_a_folder_of_its_own_come_home(run: RunDir, tmp_path: Path) -> None:
    away = RunDir(tmp_path / "away" / run.run_id)
    profiled(away, 3)
    paths = away.attempt(0).profile(3)
    paths.trace.write_bytes(b"trace")
    paths.flame_data.write_bytes(b"{}")
    paths.cuda_memory.write_bytes(b"large")
    sent = list(Courier(away, away.attempt(0), 1, [3]).news())
    for piece in sent:
        keep(run, files_of(run, run.attempt(0), 1, [3]), piece)
    home = run.attempt(0).profile(3)
    assert home.trace.read_bytes() == b"trace"
    assert home.flame_data.read_bytes() == b"{}"
    assert home.record.read_bytes() == paths.record.read_bytes()
    assert not home.cuda_memory.exists()
    assert sent[-1][0].endswith("profile.json")  # where it is, all is
