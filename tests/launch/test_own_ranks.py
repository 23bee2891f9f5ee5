"""Ranks of `command:` jobs that use a session, under a real `muster run`: failover, drains, hangs, resume.

The program (support/own_program.py) does by hand what the session does.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.files import read_lines
from muster.launch.cli import main
from support.live import LiveRun
from support.terminals import through_pipes

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow]
pytestmark += [pytest.mark.usefixtures("forked_supervisors")]

PROGRAM = Path(__file__).parents[1] / "support" / "own_program.py"


def job(*words: object, **keys: object) -> str:
    more = "".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items())
    command = [sys.executable, str(PROGRAM), *map(str, words)]
    return f"nodes: 2\nranks_per_node: 1\ngrace_s: 1\n{more}command: {json.dumps(command)}\n"


def rows(live: LiveRun) -> list[dict[str, Any]]:
    return list(read_lines(live.run.attempts))


def call(live: LiveRun, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main([*words[:1], live.run.run_id, *words[1:], "--runs", str(live.root)])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_a_program_goes_on_from_its_newest_checkpoint_after_a_rank_was_killed(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, job(15, 5, "die=12", restart={"max": 1}, checkpoint={"every_steps": 5}))
    assert live.end() == 0, live.err
    first, second = rows(live)
    assert (first["first"]["rank"], first["first"]["signal"], first["first"]["step"]) == (1, "SIGKILL", 11)
    assert [first[key] for key in ("saved_step", "last_step", "lost_steps")] == [10, 11, 1]
    assert [second[key] for key in ("from", "from_step")] == ["step-00000010.a000", 10]
    assert live.run.attempt(1).out(0).read_text() == live.run.attempt(1).out(1).read_text() == "done 15 from 10\n"
    assert len(live.events("session")) == len(live.events("joined")) == 2
    assert "had no effect" not in live.err
    assert live.run.files.stat().st_mode & 0o777 == 0o700
    start = json.loads(live.run.attempt(0).command(0).read_text())["ranks"][0]["env"]
    session = json.loads(start["MUSTER_SESSION"])
    assert start["MUSTER_FILES"] == str(live.run.files)
    assert (session["version"], session["resume"], session["saving"]) == (1, None, True)
    settings = {"every_steps": 5, "every_s": None, "keep": 3, "blocking": False, "memory_every_steps": None}
    assert session["checkpoint"] == settings


def test_ctrl_c_has_a_program_save_after_one_step_and_resume_goes_on_from_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = LiveRun(tmp_path, job(100_000))
    live.wait_for("first_step")
    code, said = call(live, capsys, "save")
    assert (code, "saved after step" in said) == (0, True)
    _, said = call(live, capsys, "status")
    assert "of 100000" in said
    assert "loss 0.5" in said
    live.interrupt()
    assert live.end() == 130
    (row,) = rows(live)
    step = live.events("saved")[-1]["step"]
    assert row["message"].endswith(f"saved after step {step}")
    assert [live.run.attempt(0).out(rank).read_text() for rank in (0, 1)] == [f"drained after {step}\n"] * 2
    code, _, err = through_pipes("resume", live.run.run_id, "--runs", str(live.root), "-x", f"OWN_STEPS={step + 2}")
    assert code == 0, err
    assert live.run.attempt(1).out(1).read_text() == f"done {step + 2} from {step}\n"


def test_ranks_of_a_program_that_stand_still_are_found_by_its_session(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, job(50, "1000", "hang=4", hang_s=4.0))
    assert live.end() != 0
    (row,) = rows(live)
    assert row["first"]["rank"] == 1
    assert "made no progress for 4 s after step 3: rank 1 did not reach wait" in row["message"]
    assert "most recent call first" in live.run.attempt(0).err(1).read_text()


def test_a_program_without_a_session_hangs_when_no_rank_writes_anything(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, job(1, "mute", hang_s=1.0, checkpoint={"every_s": "auto"}))
    assert live.end() == 124
    (row,) = rows(live)
    assert row["message"].startswith("no rank has written anything for ")
    assert "checkpoint: had no effect, because the program opened no session" in live.err


def test_three_attempts_of_a_session_without_a_checkpoint_are_enough(tmp_path: Path) -> None:
    """Without a session nobody knows whether the program gets on: only restart.max bounds it."""
    live = LiveRun(tmp_path, job(50, 1000, "die=3", "always", restart={"max": 9, "backoff": 0}))
    assert live.end() == 93, live.err
    assert "3 attempts in a row without a new checkpoint" in rows(live)[-1]["cause"] + live.err
    assert len(rows(live)) == 3
