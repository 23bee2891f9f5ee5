"""What `muster run` shows: plain output word for word, and what happens when nobody reads it any more."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from muster.jobs.basics.terminal import LONGEST_SHOWN, guard
from muster.jobs.hosts.placement import NodePlacement
from muster.jobs.runfolder.rundir import RunDir, runs_root
from muster.launch.plan.plan import NodePlan, RankPlan
from muster.launch.records.verdict import RankEnd, Verdict, judge
from muster.launch.supervision.console import MOST_LISTED, Console
from support.live import LiveRun
from support.terminals import ATTACKS, HOSTILE, forbidden_in

pytestmark = pytest.mark.command

REPOSITORY = Path(__file__).parents[2]
RUN = RunDir(runs_root(None) / "demo-1")
PROGRESS = {"report": "progress", "step": 20, "steps": 196, "loss": 2.1, "rate": 812.0, "unit": "samples/s"}


def ending(rank: int | None, cause: str = "own", **fields) -> RankEnd:
    values = {"rank": rank, "node": 1, "host": "n1", "code": 7, "signal": None, "ended": 1.0, "cause": cause}
    return RankEnd(**{**values, "message": "ValueError: bad", "last_lines": ["one", "two"], **fields})


DONE = Verdict(0, "2 ranks ended with 0")


def test_the_plan_names_every_rank_with_its_place(capsys) -> None:
    run = RunDir(Path("/runs/demo"))
    nodes = [
        NodePlan(NodePlacement(0, "n0", "10.0.0.1", 0, 1), run, False, (), (RankPlan(0, (0, 1), (), 1, tuple),)),
        NodePlan(NodePlacement(1, "n1", "10.0.0.2", 1, 1), run, False, (), (RankPlan(1, (0,), (), 1, tuple),)),
    ]
    Console().plan("/runs/demo", nodes, "10.0.0.1:4242")
    assert capsys.readouterr() == (
        "",
        "run /runs/demo\n"
        "  rank  node  host                  cores\n"
        "     0     0  n0                    0,1\n"
        "     1     1  n1                    0\n"
        "master 10.0.0.1:4242\n",
    )


def test_rank_0s_streams_stay_apart_and_are_passed_on_as_they_are(capsys) -> None:
    console = Console()
    console.lines("out", ["[bold]loss[/bold] 2.5", "größe 🚀"])
    console.lines("err", ["a warning"])
    console.say("of ours")
    assert capsys.readouterr() == ("[bold]loss[/bold] 2.5\ngröße 🚀\n", "a warning\nof ours\n")


def test_progress_is_not_drawn_where_there_is_no_terminal(capsys) -> None:
    console = Console()
    console.progress(PROGRESS)
    console.end(DONE, 1.0, RUN, "")
    assert capsys.readouterr() == ("", "done in 1.0 s: 2 ranks ended with 0 · muster status demo-1\n")


def test_on_a_terminal_the_progress_line_shows_step_loss_and_rate_and_output_to_a_file_stays_there(
    capsys, monkeypatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "100")
    console = Console()
    console.progress(PROGRESS)
    console.lines("out", ["a line"])  # standard output is a file: `muster run ... > log`
    console.progress({**PROGRESS, "step": 196})
    console.end(DONE, 1.0, RUN, "")
    shown = terminal.getvalue()
    assert "196/196" in shown
    assert "loss 2.1000  812 samples/s" in shown
    assert shown.endswith("done in 1.0 s: 2 ranks ended with 0 · muster status demo-1\n")
    assert "a line" not in shown
    assert capsys.readouterr().out == "a line\n"


def test_on_a_terminal_it_says_that_closing_it_ends_the_run(capsys, monkeypatch) -> None:
    text = "closing this terminal ends the run; muster submit starts one that continues without it\n"
    Console().plan("/runs/demo-1", [], "127.0.0.1:1")
    assert text not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    Console().plan("/runs/demo-1", [], "127.0.0.1:1")
    assert capsys.readouterr().err.endswith(text)


def test_beside_the_progress_line_only_the_progress_line_moves_the_cursor(monkeypatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, terminal)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERM", "xterm-256color")
    guard()
    console = Console()
    console.progress({**PROGRESS, "unit": f"[link=http://evil.example]x[/link]{HOSTILE}"})
    for line in ATTACKS.values():
        console.lines("out", [line])
        console.say(line)
        print(line, file=sys.stderr)
    console.lines("out", ["10%\r\x1b[32m100%\x1b[0m\x1b[K"])
    console.end(DONE, 1.0, RUN, "")
    shown = terminal.getvalue()
    assert "\x1b[32m100%\x1b[0m" in shown
    assert "20/196" in shown
    assert forbidden_in(re.sub(r"\x1b\[(\?25[lh]|1A|2K)|\r", "", shown)) == []


def test_a_failing_rank_is_shown_with_its_last_lines_its_victims_and_the_next_step(capsys) -> None:
    verdict = judge([ending(3), ending(0, "peer", ended=2.0), ending(2, "stopped", ended=3.0)], None)
    Console().end(verdict, 12.34, RUN, "look there")
    assert capsys.readouterr() == (
        "",
        "  one\n"
        "  two\n"
        "muster: rank 3 on node 1 (n1) exited with code 7: ValueError: bad\n"
        "  stopped as a consequence: rank 0, 2\n"
        "  failed, exit code 7 after 12.3 s · muster why demo-1\n"
        "  look there\n",
    )


def test_a_plan_of_very_many_ranks_is_cut_off(capsys) -> None:
    ranks = tuple(RankPlan(rank, (rank,), (), 1, tuple) for rank in range(MOST_LISTED + 2))
    node = NodePlan(NodePlacement(0, "n0", "10.0.0.1", 0, len(ranks)), RunDir(Path("/runs/demo")), False, (), ranks)
    Console().plan("/runs/demo", [node], "10.0.0.1:4242")
    *_, last, more, master = capsys.readouterr().err.splitlines()
    assert last.split() == ["255", "0", "n0", "255"]
    assert more == "   ...  and 2 more ranks: attempt-000/placement.json in the run folder"
    assert master == "master 10.0.0.1:4242"


def test_rank_0s_last_lines_are_not_repeated_below_themselves(capsys) -> None:
    Console().end(judge([ending(0)], None), 1.0, RUN, "")
    assert capsys.readouterr().err == (
        "muster: rank 0 on node 1 (n1) exited with code 7: ValueError: bad\n"
        "  failed, exit code 7 after 1.0 s · muster why demo-1\n"
    )


def test_a_lost_node_among_the_victims_is_no_rank(capsys) -> None:
    verdict = judge([ending(3, last_lines=[]), ending(None, "stopped", ended=2.0)], None)
    Console().end(verdict, 1.0, RUN, "")
    assert "stopped as a consequence" not in capsys.readouterr().err


def test_quiet_prints_nothing_when_all_goes_well(capsys) -> None:
    console = Console(quiet=True)
    console.plan("/runs/demo", [], "10.0.0.1:4242")
    console.lines("out", ["a line"])
    console.lines("err", ["a line"])
    console.progress(PROGRESS)
    console.say("of ours")
    console.end(DONE, 1.0, RUN, "")
    assert capsys.readouterr() == ("", "")


def test_quiet_still_says_why_it_failed_with_the_last_lines_that_it_hid(capsys) -> None:
    console = Console(quiet=True)
    console.lines("err", ["one", "two"])
    console.end(judge([ending(0)], None), 1.0, RUN, "look there")
    assert capsys.readouterr() == (
        "",
        "  one\n"
        "  two\n"
        "muster: rank 0 on node 1 (n1) exited with code 7: ValueError: bad\n"
        "  failed, exit code 7 after 1.0 s · muster why demo-1\n"
        "  look there\n",
    )


def test_without_somebody_to_read_it_rank_0s_output_stays_in_its_log(capsys) -> None:
    """A supervisor that was left behind writes a log of its own, which should not hold the ranks' a second time."""
    console = Console(ranks=False)
    console.say("of ours")
    console.lines("out", ["a line"])
    console.lines("err", ["a line"])
    assert capsys.readouterr() == ("", "of ours\n")


# Nobody reads ---------------------------------------------------------------------------------------------------------

TALK = """
import sys
from muster.jobs.runfolder.rundir import RunDir, runs_root
from muster.launch.supervision.console import MOST_LISTED, Console
from muster.launch.records.verdict import Verdict
console = Console()
for number in range(3):
    console.lines("out", [f"line {number}"])
console.lines("err", ["to err"])
console.end(Verdict(0, "1 rank ended with 0"), 1.0, RunDir(runs_root(None) / "demo-1"), "")
sys.stdout.flush()
sys.exit(5)
"""


def talk(stdout: int | None, stderr: int) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", TALK]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(argv, stdout=stdout, stderr=stderr, env=env, text=True, timeout=30, check=False)


@pytest.fixture
def closed_pipe():
    """The writing end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


def test_a_reader_that_has_gone_ends_the_output_but_not_the_run(closed_pipe) -> None:
    """`muster run job.yaml | head -1` must not end hours of training, whose logs are kept anyway."""
    done = talk(closed_pipe, subprocess.PIPE)
    assert done.returncode == 5
    assert done.stderr == (
        "muster: standard output is lost (Broken pipe); the run continues, and its logs are kept\n"
        "to err\n"
        "done in 1.0 s: 1 rank ended with 0 · muster status demo-1\n"
    )


def test_when_nobody_reads_standard_error_standard_output_goes_on(closed_pipe) -> None:
    done = talk(subprocess.PIPE, closed_pipe)
    assert (done.returncode, done.stdout) == (5, "line 0\nline 1\nline 2\n")
    assert talk(closed_pipe, closed_pipe).returncode == 5


def test_a_full_disk_behind_standard_output_does_not_end_the_run() -> None:
    with Path("/dev/full").open("w") as full:
        done = talk(full.fileno(), subprocess.PIPE)
    assert done.returncode == 5
    assert done.stderr.startswith("muster: standard output is lost (No space left on device); ")


def test_with_tee_every_line_has_its_rank_and_those_of_a_failed_rank_are_not_repeated(capsys) -> None:
    console = Console(tee=True)
    console.lines("out", ["one"], 3)
    console.lines("err", ["\x1b[2Jtwo"], 0)
    console.end(judge([ending(3)], None), 1.0, RUN, "")
    out, err = capsys.readouterr()
    assert out == "[rank 3] one\n"
    assert err.startswith("[rank 0] \\x1b[2Jtwo\nmuster: rank 3 on node 1 (n1) exited with code 7")


def test_a_step_without_loss_or_total_is_drawn_all_the_same(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    console = Console()
    console.progress({"report": "progress", "step": 7})
    console.progress({"report": "progress", "step": 8, "rate": 2.0})
    console.end(DONE, 1.0, RUN, "")
    assert "2 steps/s" in capsys.readouterr().err


def test_one_message_prints_a_bounded_number_of_characters(capsys) -> None:
    """An agent of ours sends less at once; a node that does not keep to it must not block the event loop."""
    Console().lines("out", ["a" * (2 * LONGEST_SHOWN), *["\0" * LONGEST_SHOWN] * 100])
    first, *rest, last = capsys.readouterr().out.splitlines()
    assert first == "a" * LONGEST_SHOWN + f"… ({2 * LONGEST_SHOWN} characters)"
    assert set(rest) == {"\\x00" * LONGEST_SHOWN}
    assert last == f"… ({101 - 1 - len(rest)} more lines)"


OUTPUTS = {
    "empty lines": r"yes '' | head -c 1000000",
    "NUL without a newline": "head -c 5000000 /dev/zero",
    "lines of DEL": r"head -c 5000000 /dev/zero | tr '\0' '\177' | fold -w 1000",
    "invalid UTF-8": r"head -c 5000000 /dev/zero | tr '\0' '\377'",
    "redrawn": r"yes '100%' | head -c 3000000 | tr '\n' '\r'",
    "escapes": r"head -c 3000000 /dev/zero | tr '\0' '\033'",
}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("kind", OUTPUTS)
def test_a_run_ends_well_whatever_its_ranks_print(tmp_path: Path, kind: str) -> None:
    """Very many short lines once did not fit into a message, so that the node was lost."""
    live = LiveRun(tmp_path, json.dumps({"command": ["sh", "-c", OUTPUTS[kind] + "; echo; echo the end"]}))
    assert live.end() == 0, live.err
    assert live.out.endswith("\nthe end\n")
    assert forbidden_in(live.out.replace("\r", "")) == []
