"""`muster memory RUN`: what ranks said of their memory beside the formulas, and what is said where there is nothing."""

import json
from pathlib import Path

import pytest

from muster.jobs.basics.files import append_lines
from muster.jobs.runfolder.memory_rows import KINDS
from muster.jobs.runfolder.rundir import RunDir
from muster.launch import cli
from muster.launch.common.storage import Courier, files_of, keep
from muster.launch.look.memories import read_memories

pytestmark = pytest.mark.command

MB = 2**20
JOB = """
name: held
nodes: 4
train:
  model: vgg11
  data: synthetic
  mode: zero1
  batch_size: 16
  optimizer: {name: adamw}
"""
PARAMETERS = 4 * 9_231_114
HELD = {"parameters": PARAMETERS, "gradients": PARAMETERS, "optimizer": PARAMETERS // 2, "buffers": 22_080}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "held-20260101T000000.000Z-abcdef")
    for attempt in range(2):
        made.attempt(attempt).path.mkdir(parents=True)
    made.events.touch()
    made.job.write_text(JOB)
    return made


def say(
    run: RunDir,
    rank: int,
    *,
    attempt: int = 0,
    steps: int = 3,
    more: int = 0,
    gpu: bool = False,
    ranks: int = 4,
    used: int = 0,
    graphs: int = 0,
) -> None:
    """Leave a rank's rows: 300 MB before its model, 40 of them libraries', then its states, and 100 MB in a step."""
    facts = {"rank": rank, "world_size": ranks, "attempt": attempt, "mode": "zero1", "host": "n1"}
    facts |= {"device": "cuda" if gpu else "cpu"}
    base, files, states = 300 * MB, 40 * MB, sum(HELD.values())

    def now(grown: int, libraries: int = 0) -> dict[str, int]:
        found = {"rss": base + grown + libraries, "files": files + libraries}
        return {**found, "allocated": grown, "reserved": grown + MB} if gpu else found

    def peak(grown: int, libraries: int = 0) -> dict[str, int]:
        return {name: value for name, value in now(grown, libraries).items() if name != "files"}

    rows = [{"point": "baseline", **facts, "now": now(0)}]
    without = {**HELD, "gradients": 0}
    rows += [{"point": "init", "held": without, "now": now(states - PARAMETERS), "peak": peak(states)}]
    for step in range(1, steps + 1):
        rows += [
            {"point": point, "step": step, "held": HELD, "now": now(states, 7 * MB), "peak": peak(top, 7 * MB)}
            for point, top in (("before_step", states + 100 * MB + more), ("after_step", states + MB))
        ]
    if used:
        rows[2]["used"] = used
    rows += [{"point": "end", "now": now(states, 7 * MB), "peak": peak(states + 900 * MB, 7 * MB)}]
    if graphs:
        rows[-1]["graphs"] = graphs
    append_lines(run.attempt(attempt).memory(rank), rows)


def test_on_cpus_what_the_heap_had_in_use_stands_beside_the_peak(run, capsys):
    say(run, 0, used=100 * MB)
    text = shown(run, capsys)
    assert lines_of(text, 0)["in use"][0] == "100 MB"
    assert lines_of(text, 0)["while made"][0] == "88.06 MB"
    assert "in use: peak of the bytes allocated on the heap" in text
    say(run, 0, attempt=1)
    assert "in use" not in shown(run, capsys)


def shown(run: RunDir, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["memory", str(run.path), *arguments]) == 0
    return capsys.readouterr().out


def lines_of(text: str, rank: int) -> dict[str, list[str]]:
    """Read the table: of a rank, by what, the columns after it."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
        if cells and cells[0] == str(rank):
            found[cells[1]] = cells[2:]
    return found


def test_each_rank_s_kinds_stand_beside_the_formula_s(run, capsys):
    say(run, 0)
    say(run, 1, more=MB)
    text = shown(run, capsys)
    assert text.splitlines()[0] == f"{run.run_id}, attempt 0: mode zero1, 2 ranks on cpu"
    first = lines_of(text, 0)
    assert first["parameters"] == ["35.21 MB", "35.21 MB", "1.000"]
    assert first["gradients"] == ["35.21 MB", "35.21 MB", "1.000"]
    assert first["optimizer"] == ["17.61 MB", "17.61 MB", "1.000"]
    assert first["buffers"] == ["21.56 KB", "21.56 KB", "1.000"]
    assert first["after a step"] == first["all of these"] == ["88.06 MB", "88.06 MB", "1.000"]
    assert first["peak"][0] == "188.1 MB"  # neither the pages of libraries nor the evaluation at the end
    assert lines_of(text, 1)["peak"][0] == "189.1 MB"
    assert "the first 3 steps" in text


def test_zero3_that_keeps_masters_alone_says_what_a_textbook_counts(run, capsys):
    run.job.write_text(JOB.replace("zero1", "zero3") + "  precision: pure_bf16\n")
    say(run, 0)
    text = shown(run, capsys)
    assert lines_of(text, 0)["parameters"][1] == "0"
    assert "In textbooks, a rank also keeps a shard of 2 P / N bytes: parameters 4.402 MB, all states 35.21 MB" in text
    run.job.write_text(JOB)
    assert "textbook" not in shown(run, capsys)


def test_as_json_it_has_bytes_ratios_and_what_is_not_explained(run, capsys):
    say(run, 0)
    told = json.loads(shown(run, capsys, "--json"))
    (rank,) = told["ranks"]
    rows = {row["what"]: row for row in rank["rows"]}
    assert {kind: rows[kind]["measured"] for kind in KINDS} == HELD == rank["held"]
    assert rows["gradients"]["ratio"] == 1.0
    peak = rows["peak"]
    assert peak["measured"] == sum(HELD.values()) + 100 * MB
    assert rows["not explained"]["measured"] == round(peak["measured"] - peak["formula"])
    assert rank["peaks"]["end"] == sum(HELD.values()) + 900 * MB


def test_a_gpu_is_what_its_allocator_says(run, capsys):
    say(run, 0, gpu=True)
    text = shown(run, capsys)
    assert lines_of(text, 0)["peak"][0] == "188.1 MB"
    assert lines_of(text, 0)["reserved"][0] == "989.1 MB"
    assert "memory allocated by the CUDA allocator" in text
    assert "graphs" not in text


def test_memory_of_recorded_graphs_is_shown(run, capsys):
    say(run, 0, gpu=True, graphs=64 * MB)
    text = shown(run, capsys)
    assert lines_of(text, 0)["graphs"][0] == "64 MB"
    assert "which only their replays use; cuda_graph: false saves it" in text
    (rank,) = json.loads(shown(run, capsys, "--json"))["ranks"]
    assert rank["graphs"] == 64 * MB


def test_before_the_first_step_there_is_what_init_has_made(run, capsys):
    say(run, 0, steps=0)
    text = shown(run, capsys)
    assert lines_of(text, 0)["gradients"][0] == "0"
    assert "peak" not in lines_of(text, 0)
    assert "no step is done yet" in text


def test_of_many_ranks_the_fullest_are_shown_and_any_may_be_named(run, capsys):
    for rank in range(12):
        say(run, rank, more=rank * MB, ranks=12)
    ranks = {line.split()[0] for line in shown(run, capsys).splitlines()[3:] if line[:6].strip().isdecimal()}
    assert ranks == {str(rank) for rank in range(4, 12)}
    assert set(lines_of(shown(run, capsys, "--rank", "0"), 0)) >= set(KINDS)
    assert len(json.loads(shown(run, capsys, "--json"))["ranks"]) == 12


def test_the_newest_attempt_that_said_anything_is_shown_with_its_own_number_of_ranks(run, capsys):
    say(run, 0)
    say(run, 0, attempt=1, ranks=2)
    text = shown(run, capsys)
    assert "attempt 1" in text
    assert lines_of(text, 0)["optimizer"] == ["17.61 MB", "35.21 MB", "0.500"]
    assert "attempt 0" in shown(run, capsys, "--attempt", "0")


def test_without_a_job_file_there_is_no_formula(run, capsys):
    say(run, 0)
    run.job.unlink()
    text = shown(run, capsys)
    assert lines_of(text, 0)["optimizer"] == ["17.61 MB", "-", "-"]
    assert "the formula's memory is unknown" in text


@pytest.mark.parametrize("text", ["", "{", '{"point": "init"}\n', '{"point": "baseline"}\n{"point": "init"}\n'])
def test_a_torn_record_is_none(run, text):
    say(run, 0)
    run.attempt(0).memory(1).write_text(text)
    assert [each.rank for each in read_memories(run, None)[1]] == [0]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 72, "no rank has recorded its memory; ranks of train: jobs do so when they start"),
        (("--attempt", "1"), 72, "attempt 1 of held-"),
        (("--attempt", "-1"), 2, "--attempt: must be at least 0, got -1"),
        (("--world", "4"), 2, "--world: does not apply to a run; leave it out, or name a job"),
        (("--set", "train.seed=1"), 2, "--set: does not apply to a run"),
    ],
)
def test_what_is_not_there_or_not_meant_is_said(run, capsys, arguments, code, message):
    assert cli.main(["memory", str(run.path), *arguments]) == code
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_a_rank_that_said_nothing_is_named(run, capsys):
    say(run, 0)
    assert cli.main(["memory", str(run.path), "--rank", "0-2"]) == 72
    assert "nothing is recorded for rank 1-2; recorded ranks:" in capsys.readouterr().err
    assert cli.main(["memory", str(run.path), "--rank", "7"]) == 2


def test_a_node_with_a_folder_of_its_own_sends_it_home(run, tmp_path):
    say(run, 2)
    home = RunDir(tmp_path / "home")
    home.attempt(0).path.mkdir(parents=True)
    for piece in Courier(run, run.attempt(0), 1, [2, 3]).news():
        keep(home, files_of(home, home.attempt(0), 1, [2, 3]), piece)
    assert home.attempt(0).memory(2).read_bytes() == run.attempt(0).memory(2).read_bytes()


def test_copies_in_the_memory_of_nodes_are_shown_with_their_cost(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    say(run, 0)
    assert "copies of the state" not in shown(run, capsys)
    rows = [
        {"event": "copied", "step": 10, "bytes": 1, "sent": 1, "seconds": 1.0},
        {"event": "copied", "step": 20, "bytes": 300 * MB, "sent": 150 * MB, "seconds": 2.0},
        {"event": "copied", "step": "30", "bytes": -1, "sent": [], "seconds": None},  # damaged
    ]
    append_lines(run.events, rows)
    text = shown(run, capsys)
    assert "300 MB, and 600 MB while the next copy is made; the copy of step 20 took 2.00 s" in text
    assert "in which a node sent 150 MB, 79 MB/s" in text
    record = json.loads(shown(run, capsys, "--json"))
    assert record["copies"] == {"step": 20, "held": 300 * MB, "sent": 150 * MB, "seconds": 2.0}
