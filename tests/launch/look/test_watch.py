"""What `muster watch` shows, of run folders that are written row by row; a real run is in test_watch_in_tmux.py."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from muster.jobs.basics.files import append_line
from muster.jobs.hosts.placement import NodePlacement
from muster.launch.cli import main
from muster.launch.look.watch import steps as steps_of_ranks
from muster.launch.look.watch.frame import ViewChoice, WatchFrame, draw
from muster.launch.look.watch.steps import TAIL_BYTES, RankSteps
from muster.launch.look.watch.watched import RunReader, WatchedRun
from muster.launch.records.progress_file import ProgressFile, read_progress
from muster.launch.records.stragglers import Slowness, Straggler
from muster.launch.supervision.run_nodes import NodeState
from support.terminals import HOSTILE, forbidden_in

RANKS, PER_NODE = 1000, 8
TRAIN = "train: {model: vgg11, data: digits, batch_size: 4000}\n"
JOB = f"nodes: 125\nranks_per_node: 8\ncheckpoint: {{every_steps: 50}}\n{TRAIN}"


def a_step(number: int, *, work_s: float = 0.06, seconds: float = 0.1, **fields: Any) -> dict[str, Any]:
    """A rank's row: what of the step is not work it has waited for others."""
    row = {"step": number, "steps": 500, "attempt": 0, "time": time.time(), "step_s": seconds}
    return row | {"forward_s": work_s, "communication_s": seconds - work_s} | fields


def text_of(frame: WatchFrame) -> str:
    return "\n".join(str(line) for line in frame.lines)


@pytest.fixture
def large(make_run: Callable[..., Any]) -> Any:
    """A run of 1,000 ranks at step 120, saved after 100: rank 333 is slow, rank 700 suspended, node 9 silent."""
    folder = make_run().submitted(world_size=RANKS, nodes=125).attempt(world_size=RANKS)
    folder.started(world_size=RANKS, per_node=PER_NODE, host="n").event("joined", 2.0, attempt=0)
    folder.run.job.write_text(JOB)
    for rank in range(RANKS):
        chance, path = random.Random(rank), folder.run.attempt(0).metrics(rank)
        rows = [a_step(each, work_s=0.06 * chance.uniform(0.97, 1.03)) for each in range(101, 121)]
        path.write_text("".join(json.dumps(row | {"time": row["time"] + 0.1 * row["step"]}) + "\n" for row in rows))
    slow = Straggler("rank", 41, "n", None, (333,), Slowness(0.08, 0.079, 0.06, 0.02, "forward and backward", 101, 120))
    folder.event("slow", 30.0, attempt=0, stragglers=[slow.record()])
    folder.step(120, steps=500)
    manifest = folder.run.checkpoint(100, 0).manifest
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    nodes: Any = [
        {"node": node, "host": "n", "heard_s": 9.0 if node == 9 else 0.2, "ranks": []}
        for node in range(RANKS // PER_NODE)
    ]
    for rank in range(RANKS):
        row = [rank, "run", 120, 4.5, "T" if rank == 700 else "", rank % PER_NODE, rank << 24]
        nodes[rank // PER_NODE]["ranks"].append(row)
    folder.run.progress.write_text(json.dumps({"time": time.time(), "attempt": 0, "nodes": nodes}))
    return folder


def test_of_1000_ranks_the_nodes_that_matter_stand_first_on_60_columns_and_20_lines(large: Any) -> None:
    watch = RunReader(large.run)
    watched = watch.look(sweep=RANKS)
    assert (watched.step, watched.lost_steps, watched.next_save[0], watched.left_s) == (
        120,
        20,
        150,
        pytest.approx(38.0, rel=0.02),
    )  # type: ignore[index]
    assert watched.communication == pytest.approx(0.4, abs=0.01)
    frame = draw(watched, ViewChoice(), 60, 20)
    assert len(frame.lines) <= 20
    assert all(cell_len(str(line)) <= 60 for line in frame.lines)
    text = text_of(frame)
    assert "1,000 run; 1 suspended, 8 silent, 1 slow" in text
    assert "next at step 150" in text
    assert "loses 20 steps" in text
    table = [line.split() for line in text.partition("node  ")[2].splitlines()[1:4]]
    assert [(row[0], *row[-2:]) for row in table] == [
        ("87", "1", "suspended"),
        ("9", "8", "silent"),
        ("41", "1", "slow"),
    ]
    assert text.splitlines()[-1].startswith("1-7 of 125 nodes")
    # Down to the last node, then beyond it; the ranks that are shown are those that are asked for again.
    last = draw(watched, ViewChoice(top=1 << 30), 60, 20)
    assert str(last.lines[-2]).split()[0] == "124"
    assert str(last.lines[-1]).startswith("119-125 of 125 nodes")
    ranks = draw(watched, replace(last.choice, view="ranks", top=0), 60, 20)
    assert [each.split()[0] for each in text_of(ranks).splitlines()[-8:-5]] == ["700", "72", "73"]
    assert len(ranks.ranks) == 7
    assert 700 in ranks.ranks
    assert str(draw(watched, ViewChoice(), 120, 20).lines[-2]).split()[-4:] == ["4", "%", "752", "MB"]
    chosen = draw(watched, ViewChoice(ranks=frozenset({3, 333})), 200, None)
    assert [str(line).split()[0] for line in chosen.lines[-2:]] == ["3", "333"]
    for width, height in ((1, 1), (8, 3), (20, 5), (60, 20), (100, 10), (300, 80)):
        frame = draw(watched, ViewChoice(), width, height)
        assert len(frame.lines) <= height
        assert all(cell_len(str(line)) <= width for line in frame.lines)


def test_a_failed_run_shows_its_end_and_every_name_is_escaped(make_run: Any, capsys: Any) -> None:
    folder = make_run().submitted(name=HOSTILE, host=HOSTILE).attempt().started(host=HOSTILE + "\n\tnext line")
    folder.exited(3, 5.0, code=1, cause="own", host=HOSTILE, message=HOSTILE)
    folder.verdict(**{"class": "failed", "code": 1, "message": HOSTILE})
    folder.event("attempt", 6.0, attempt=1, world_size=4).started(1, host=HOSTILE + "\n\tnext line")
    folder.ended(7.0, code=1, name=HOSTILE, message=HOSTILE).step(3, unit=HOSTILE)
    folder.run.progress.write_text('{"time": 1e999, "attempt": "' + "x" * 1000 + '", "nodes": [[[[')
    frame = draw(RunReader(folder.run).look(), ViewChoice(), 100, 30)
    assert forbidden_in(text_of(frame)) == []
    assert not any("\n" in str(line) or "\t" in str(line) for line in frame.lines)
    assert main(["watch", "--runs", str(folder.root)]) == 0
    out = capsys.readouterr().out
    assert "outcome" in out
    assert forbidden_in(out) == []
    assert main(["watch", "--json", "--once", "--runs", str(folder.root)]) == 0
    assert json.loads(capsys.readouterr().out)["message"] == HOSTILE
    assert main(["watch", "--ranks", "9", "--runs", str(folder.root)]) == 2
    assert "--ranks: 9 is not in this run (valid: 0-3)" in capsys.readouterr().err


def test_a_run_that_goes_on_is_followed_from_the_queue_to_its_end(make_run: Any) -> None:
    folder = make_run().submitted()
    watch = RunReader(folder.run)

    def look() -> tuple[str, int | None, str | None, list[str]]:
        watched = watch.look()
        return watched.state.state, watched.step, watched.why, [each.phase for each in watched.ranks]

    assert look() == ("starting", None, None, ["waiting"] * 4)
    folder.attempt().started().event("joined", 2.0, attempt=0)
    assert look() == ("running", None, None, ["running"] * 4)
    folder.step(8)
    for rank in range(4):
        append_line(folder.run.attempt(0).metrics(rank), a_step(8 + rank % 2))
    assert look()[1] == 8  # what all have done
    folder.exited(1, 5.0, cause="own", signal="SIGKILL")
    first = {"rank": 1, "node": 0, "host": "n0", "code": None, "signal": "SIGKILL", "ended": 5.0, "cause": "own"}
    folder.verdict(first=first).event("restarting", 6.0, attempt=1, why="rank 1 failed")
    assert look()[0] == "restarting"
    folder.event("resuming", 6.5, attempt=1, step=4, checkpoint="step-00000004.a000").attempt(1, after_s=7.0).started(1)
    assert look() == ("starting", 4, "rank 1 on node 0 (n0) was killed by SIGKILL", ["running"] * 4)
    folder.ended(9.0)
    assert look()[0] == "done"
    folder.run.events.write_bytes(b"")  # cut: what was known of it is gone
    assert look()[0] != "done"


def test_a_hang_is_what_the_supervisor_calls_one(make_run: Any) -> None:
    folder = make_run().submitted().attempt().started().event("joined", 2.0, attempt=0)
    watch = RunReader(folder.run)
    assert [each.mark for each in watch.look().ranks] == [""] * 4
    folder.event("hang", 40.0, attempt=0, seconds=31.0, phase="run").exited(2, 41.0, code=1, cause="own", hung=True)
    assert [each.mark for each in watch.look().ranks] == ["hang", "hang", "failed", "hang"]


@pytest.mark.parametrize(
    ("policy", "due"),
    [("{every_steps: 7}", 14), ("{every_s: 30}", 40), ("{every_s: auto}", 43), ("{}", 43), (None, None)],  # of 3 h
)
def test_the_next_checkpoint_follows_the_job(make_run: Any, policy: str | None, due: int | None) -> None:
    folder = make_run().submitted(started=time.time())
    append_line(folder.run.events, {"time": time.time(), "event": "attempt", "attempt": 0, "world_size": 4})
    folder.run.attempt(0).path.mkdir()
    folder.started().event("joined", 2.0, attempt=0).step(10, steps=1000)
    saving = "" if policy is None else f"checkpoint: {policy}\n"
    folder.run.job.write_text(
        f"nodes: 2\nranks_per_node: 2\n{saving}train: {{model: vgg11, data: digits, batch_size: 40}}\n"
    )
    for rank in range(4):
        for number in (9, 10):
            append_line(folder.run.attempt(0).metrics(rank), a_step(number, seconds=1.0, time=time.time() + number))
    watched = RunReader(folder.run).look()
    assert watched.saves == (policy is not None)
    assert watched.lost_steps == 10
    assert (watched.next_save and watched.next_save[0]) == (due if due is None else pytest.approx(due, abs=1))


# Steps ----------------------------------------------------------------------------------------------------------------


def test_only_the_end_of_a_file_is_read_and_a_torn_line_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, most = tmp_path / "metrics-00000.jsonl", []
    whole = steps_of_ranks.read_end
    monkeypatch.setattr(steps_of_ranks, "read_end", lambda path, size: most.append(size) or whole(path, size))
    ranks = RankSteps(path)
    ranks.look()  # it is not there yet
    with path.open("wb") as file:
        file.seek(1 << 30)  # a hole of a gigabyte
        file.write(b'\n{"step": [[[[' + b"\n" + b"".join(json.dumps(a_step(each)).encode() + b"\n" for each in (7, 8)))
        file.write(json.dumps(a_step(9)).encode()[:30])
    ranks.look()
    assert [step.number for step in ranks.steps] == [7, 8]
    with path.open("ab") as file:
        file.write(
            json.dumps(a_step(9)).encode()[30:] + b"\n[1]\n" + json.dumps(a_step(10, step_s=1e999)).encode() + b"\n"
        )
    ranks.look()
    assert [step.number for step in ranks.steps] == [7, 8, 9]
    ranks.look()  # nothing new: not read
    assert most == [TAIL_BYTES] * 2
    assert ranks.communication == pytest.approx(0.4)


# What the supervisor writes -------------------------------------------------------------------------------------------


def test_progress_is_written_at_most_once_a_second_for_this_user_and_read_back(make_run: Any) -> None:
    run = make_run().run
    run.path.chmod(0o700)
    rank = {"phase": "run", "steps": 7, "beats_age_s": 1.5, "state": "T"}
    told: Any = {"sessions": 1, "output_age_s": None, "ranks": {"3": rank, "a name that a node made up": rank}}
    node = NodeState(NodePlacement(0, "n0", "", 0, 4), heard=time.monotonic(), progress=told, ranks_at=time.monotonic())
    file = ProgressFile(run)
    file.write(2, [node])
    assert run.progress.stat().st_mode & 0o777 == 0o600
    found = read_progress(run)
    assert found is not None
    assert (found.attempt, list(found.heard_s)) == (2, [0])
    assert list(found.ranks) == [3]
    assert (found.ranks[3].phase, found.ranks[3].steps, found.ranks[3].suspended) == ("run", 7, True)
    assert found.ranks[3].silent_s == pytest.approx(1.5, abs=0.5)
    before = run.progress.stat().st_ino
    file.write(2, [node])
    assert run.progress.stat().st_ino == before
    file.remove()
    assert read_progress(run) is None


def test_of_malformed_progress_only_what_fits_is_read(make_run: Any) -> None:
    run = make_run().submitted().attempt().started().run
    nodes = [7, {"node": -1, "heard_s": 1}, {"node": 1, "heard_s": 1e400, "ranks": {"0": 1}}]
    nodes.append(
        {
            "node": 0,
            "heard_s": 2,
            "ranks": [
                [0, "run", 5, 1, ""],
                [1, "run", 5, 1],
                [2, 3, 5, 1, ""],
                [1 << 40, "run", 5, 1, ""],
                4,
                [7, "run", 5, 1, "", 250, 1],
            ],
        }
    )
    run.progress.write_text(json.dumps({"time": time.time(), "attempt": 0, "nodes": nodes}))
    found = read_progress(run)
    assert found is not None
    assert (list(found.heard_s), list(found.ranks)) == ([0], [0, 7])
    assert (found.ranks[7].gpu_percent, found.ranks[7].gpu_bytes) == (None, 1)
    for text in ("", "[]", "{", '{"time": 5}', '{"time": "now", "attempt": 0, "nodes": []}', "\x00" * 50):
        run.progress.write_text(text)
        assert read_progress(run) is None
    assert isinstance(RunReader(run).look(), WatchedRun)
