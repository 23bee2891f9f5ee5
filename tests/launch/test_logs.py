"""`muster logs` against what the ranks wrote."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.command, pytest.mark.slow]

ID = "vgg-20250101T000000Z-abc123"


def running(folder):
    """Return a run of four ranks on two nodes that goes on."""
    folder.submitted().attempt().started()
    return folder.event("joined", 2.0, attempt=0, seconds=1.0)


def test_lines_are_merged_rank_after_rank_with_rank_and_node(make_run, muster) -> None:
    folder = (
        running(make_run()).write(3, "three\n").write(0, "zero\n").write(0, "oops\n", stream="err").write(0, "more\n")
    )
    folder.ended()
    assert muster("logs") == (
        0,
        "[rank 0 node 0] zero\n[rank 0 node 0] more\n[rank 0 node 0] oops\n[rank 3 node 1] three\n",
        "",
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rank", "0,2-3"], ["out0", "err0", "out2", "err2", "out3", "err3"]),
        (["--node", "1", "--stream", "out"], ["out2", "out3"]),
        (["--stream", "err", "--rank", "1"], ["err1"]),
        (["--grep", "t[02]$"], ["out0", "out2"]),
        (["--rank", "1", "--grep", "^err"], ["err1"]),
    ],
)
def test_lines_are_chosen_by_rank_node_stream_and_pattern(make_run, muster, options, words) -> None:
    folder = running(make_run())
    for rank in range(4):
        folder.write(rank, f"out{rank}\n").write(rank, f"err{rank}\n", stream="err")
    code, out, _ = muster("logs", "--raw", *options)
    assert (code, out.split()) == (0, words)


def test_an_unfinished_line_is_held_until_the_run_has_ended(make_run, muster) -> None:
    folder = running(make_run()).write(0, "whole\nunfin")
    assert muster("logs", "--raw")[1] == "whole\n"
    folder.ended()
    assert muster("logs", "--raw")[1] == "whole\nunfin\n"


def test_the_newest_attempt_is_shown_unless_another_is_asked_for(make_run, muster) -> None:
    running(make_run()).write(0, "first\nhalf").attempt(1, after_s=5.0).write(0, "second\n", attempt=1)
    assert muster("logs", "--raw") == (0, "second\n", "")
    assert muster("logs", "--raw", "--attempt", "0") == (0, "first\nhalf\n", "")
    assert muster("logs", "--raw", "--attempt", "all") == (0, "first\nhalf\nsecond\n", "muster: attempt 1\n")


def test_an_attempt_that_is_past_is_not_followed_for_ever(make_run, muster) -> None:
    running(make_run()).write(0, "first\n").attempt(1, after_s=5.0)
    assert muster("logs", "-f", "--raw", "--attempt", "0") == (0, "first\n", "")


def test_lines_as_json_carry_rank_node_attempt_and_stream(make_run, muster) -> None:
    running(make_run()).write(2, 'say "hé"\n', stream="err")
    _, out, _ = muster("logs", "--json")
    assert json.loads(out) == {"rank": 2, "node": 1, "attempt": 0, "stream": "err", "line": 'say "hé"'}


def test_the_tail_is_that_of_each_file(make_run, muster) -> None:
    running(make_run()).write(0, "a\nb\nc\n").write(1, "d\n")
    assert muster("logs", "--raw", "--tail", "2")[1] == "b\nc\nd\n"
    assert muster("logs", "--raw", "--tail", "0")[1] == ""


def test_bytes_that_are_no_text_are_replaced(make_run, muster) -> None:
    running(make_run()).write(0, b"a\xff\xfeb\xc3\n")
    assert muster("logs", "--raw")[1] == "a\ufffd\ufffdb\ufffd\n"


def test_a_redrawn_bar_shows_its_last_state_unless_raw(make_run, muster) -> None:
    running(make_run()).write(0, "10%\r99%\n")
    assert muster("logs")[1] == "[rank 0 node 0] 99%\n"
    assert muster("logs", "--raw")[1] == "10%\r99%\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank", "4"], "--rank: 4 is not in this run (valid: 0-3)"),
        (["--node", "2"], "--node: 2 is not in this run (valid: 0-1)"),
        (["--attempt", "7"], "--attempt: this run has no attempt '7' (valid: 0, or all)"),
        (["--tail", "-1"], "--tail: must be at least 0, got -1"),
        (
            ["--grep", "("],
            "--grep: '(' is not a valid regular expression: missing ), unterminated subpattern at position 0; "
            "put \\ before ( [ * + ? .",
        ),
    ],
)
def test_a_wrong_choice_is_refused_with_what_is_valid(make_run, muster, options, message) -> None:
    running(make_run())
    assert muster("logs", *options) == (2, "", f"muster: {message}\n")


def test_a_shrunk_run_still_has_the_ranks_it_once_had(make_run, muster) -> None:
    folder = running(make_run()).write(3, "three\n").attempt(1, world_size=2, after_s=5.0)
    folder.write(0, "zero\n", attempt=1)
    assert muster("logs", "--raw", "--rank", "3", "--attempt", "0")[1] == "three\n"


def test_nothing_written_is_said_on_standard_error(make_run, muster) -> None:
    running(make_run())
    assert muster("logs") == (
        0,
        "",
        f"muster: {ID}: none of the chosen ranks has written anything yet; add -f to wait\n",
    )


def test_a_direct_run_without_logs_says_where_they_are(make_run, muster) -> None:
    make_run().event("submitted", transport="direct", world_size=2)
    assert "because the run was started directly; look at the output of its launcher" in muster("logs")[2]


class Follower:
    """`muster logs -f` in a process of its own, read line by line."""

    def __init__(self, folder, *options: str) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        argv = [sys.executable, "-m", "muster", "logs", "-f", "--runs", str(folder.root), *options]
        self.process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def expect(self, line: str) -> None:
        """Read one line; a wait without end is cut by the test's time-out."""
        assert self.process.stdout.readline() == line + "\n"

    def finish(self) -> tuple[int, str, str]:
        """Return code, rest of the output, and standard error."""
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


def test_following_prints_lines_as_they_come_from_files_and_attempts_that_appear_later(make_run) -> None:
    folder = running(make_run()).write(0, "zero\n")
    follower = Follower(folder)
    follower.expect("[rank 0 node 0] zero")
    folder.write(2, "tw")
    folder.write(0, "again\n")
    follower.expect("[rank 0 node 0] again")
    folder.write(2, "o\n")
    follower.expect("[rank 2 node 1] two")
    folder.attempt(1, world_size=2, after_s=5.0).started(1, world_size=2, per_node=1).write(1, "new\n", attempt=1)
    follower.expect("[rank 1 node 1] new")
    folder.write(1, "last", attempt=1).ended()
    assert follower.finish() == (0, "[rank 1 node 1] last\n", "muster: attempt 1\n")


def test_following_survives_a_file_that_is_cut_and_says_so(make_run) -> None:
    folder = running(make_run()).write(0, "one\ntwo\n")
    follower = Follower(folder, "--raw")
    follower.expect("one")
    follower.expect("two")
    os.truncate(folder.run.attempt(0).out(0), 0)
    folder.write(0, "three\n")
    follower.expect("three")
    folder.ended()
    assert follower.finish() == (
        0,
        "",
        "muster: rank-00000.out was truncated or replaced; reading it again from the start\n",
    )


def test_following_ends_when_the_supervisor_is_lost(make_run) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as supervisor:
        from muster.launch.common import processes

        folder = make_run().submitted(pid=supervisor.pid, pid_start=processes.start_ticks(supervisor.pid))
        folder.attempt().started().write(0, "zero\n")
        follower = Follower(folder, "--raw")
        follower.expect("zero")
        supervisor.communicate(b"\n")
    assert follower.finish() == (0, "", "")


def test_following_costs_next_to_nothing_while_nothing_comes(make_run) -> None:
    """Polling every 0.1 s is no busy loop: the processor time of ten looks is far below their wall time."""
    folder = running(make_run()).write(0, "zero\n")
    follower = Follower(folder)
    follower.expect("[rank 0 node 0] zero")

    def processor_s() -> float:
        text = Path(f"/proc/{follower.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(text[11]) + int(text[12])) / os.sysconf("SC_CLK_TCK")

    before, begin = processor_s(), time.monotonic()
    threading.Event().wait(1.0)
    used, wall = processor_s() - before, time.monotonic() - begin
    folder.ended()
    follower.finish()
    assert used < 0.5 * wall


def test_output_cut_by_head_ends_quietly(make_run) -> None:
    folder = running(make_run()).write(0, "line\n" * 200_000).ended()
    follower = Follower(folder)
    follower.expect("[rank 0 node 0] line")
    follower.process.stdout.close()
    assert follower.process.stderr.read() == ""
    follower.process.stderr.close()
    assert follower.process.wait(20) == 141


def test_lines_are_coloured_by_rank_on_a_terminal_only(make_run, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from muster.launch.commands.logs import LogLine, Printer

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    Printer(raw=False, as_json=False, pattern=None).show(
        [LogLine(0, 0, 0, "out", "a"), LogLine(1, None, 0, "out", "b")]
    )
    assert capsys.readouterr().out == "\x1b[36m[rank 0 node 0]\x1b[0m a\n\x1b[33m[rank 1]\x1b[0m b\n"
    monkeypatch.setenv("NO_COLOR", "1")
    Printer(raw=False, as_json=False, pattern=None).show([LogLine(0, 0, 0, "out", "a")])
    assert capsys.readouterr().out == "[rank 0 node 0] a\n"
