"""Programs of users under a rank parent: the page and the pipe that they inherit, and what they may write there."""

import os
import signal
import sys

import pytest

from muster.jobs.node.page import NEVER
from muster.launch.common.processes import start_ticks
from support.live import wait_until
from support.warm import SLEEP, STUBBORN, Warm

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow]

SESSION = """
import faulthandler, os, signal, sys, time
from muster.jobs.hosts import ranks
from muster.jobs.node.page import Page, Phase
from muster.jobs.node.reports import Reporter
page = Page.attach(ranks.inherited(os.environ, ranks.PAGE))
reporter = Reporter(os.environ)
if "dumps" in sys.argv:
    faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
page.open_session(os.getpid(), deaf="deaf" in sys.argv, dumps="dumps" in sys.argv)
page.enter(Phase.RUN)
page.step_done(3, 0.5)
reporter.first_step(3)
print("ready", flush=True)
try:
    while not page.hold:
        time.sleep(0.001)
except KeyboardInterrupt:
    sys.exit(9)
if "ends" in sys.argv:
    page.enter(Phase.END)
    time.sleep(1000)
page.held = page.steps
while page.stop_at < 0:
    time.sleep(0.001)
sys.exit(75)
"""
PROGRAM = [sys.executable, "-c", SESSION]
GARBAGE = """
import os
fd = int(os.environ["MUSTER_STATUS_FD"].partition(":")[0])
os.write(fd, b'no json\\n[1]\\n{"report": 7}\\n{}\\n\\xff\\n' + b"[" * 3000 + b"\\n" + b'{"report": "joined"}\\n')
page = int(os.environ["MUSTER_PAGE"].partition(":")[0])
os.pwrite(page, b"\\xfe" * 80, 0)
print("ready", flush=True)
"""


def test_a_program_that_opens_a_session_is_seen_held_and_stopped_as_a_rank_of_ours(warm: Warm) -> None:
    """Of the shell that starts it, the session is the child."""
    script = ["bash", "-c", '"$0" "$@"; exit $?', *PROGRAM]
    warm.start(warm.rank(0, PROGRAM), warm.rank(1, script))
    assert [warm.next("report")["report"] for _ in range(2)] == [{"report": "first_step", "step": 3}] * 2
    seen = {"phase": "run", "steps": 3, "beats": 2, "slowest_s": 0.5, "held": NEVER, "session": True}
    assert warm.looked() == {0: seen, 1: seen}
    warm.tell({"do": "hold"})
    wait_until(lambda: [each["held"] for each in warm.looked().values()] == [3, 3], "both ranks to hold")
    warm.tell({"do": "stop_at", "steps": 4})
    assert [(end["code"], end["sent"], end["steps"]) for end in warm.end_of(0, 1)] == [(75, None, 3)] * 2


def test_a_program_whose_steps_are_over_tells_no_more(warm: Warm) -> None:
    """It may draw plots for an hour: nobody is to take that for a hang."""
    warm.start(warm.rank(0, [*PROGRAM, "ends"]))
    warm.next("report")
    assert warm.looked()[0]["session"]
    warm.tell({"do": "hold"})
    wait_until(lambda: not warm.looked()[0]["session"], "the end of its steps")
    seen = warm.looked()[0]
    assert (seen["phase"], seen["steps"]) == ("start", 3)
    assert warm.stop(0)["left"] == []


def test_only_a_session_that_says_so_is_asked_for_its_stacks(warm: Warm) -> None:
    """SIGQUIT ends a program that has no handler. Of a script, the session below it writes them."""
    warm.start(
        warm.rank(0, ["bash", "-c", '"$0" "$@"; exit $?', *PROGRAM, "dumps"]),
        warm.rank(1, PROGRAM),
        warm.rank(2, SLEEP),
    )
    for rank in (0, 1):
        warm.wait_for_output(rank)
        warm.next("report")
    warm.tell({"do": "dump"})
    assert warm.next("dumped")["dumped"].keys() == {"0", "1", "2"}
    wait_until(lambda: "most recent call first" in warm.err(0).read_text(), "the stacks of rank 0")
    assert warm.looked().keys() == {0, 1, 2}
    assert warm.err(1).read_text() == warm.err(2).read_text() == ""


def test_a_session_that_ignores_term_is_asked_to_end_by_an_interrupt(warm: Warm) -> None:
    warm.start(warm.rank(0, [*PROGRAM, "deaf"]), warm.rank(1, PROGRAM))
    for rank in (0, 1):
        warm.wait_for_output(rank)
        warm.next("report")
    warm.tell({"do": "stop", "grace_s": 20.0})
    first, second = warm.end_of(0, 1)
    assert (first["code"], first["sent"]) == (9, "SIGINT")
    assert (second["signal"], second["sent"]) == ("SIGTERM", "SIGTERM")


def test_a_program_may_write_anything_into_its_pipe_and_its_page(warm: Warm) -> None:
    warm.start(warm.rank(0, [sys.executable, "-c", GARBAGE]), warm.rank(1, SLEEP))
    assert warm.next("report")["report"] == {"report": "joined"}
    assert warm.end_of(0)[0]["code"] == 0
    assert warm.looked().keys() == {1}


SAVES = """
import os, signal, sys, time
def save(*_):
    while not os.path.exists("go"):
        time.sleep(0.001)
    open("saved", "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    time.sleep(1000)
"""
RUNS = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
WRAPPERS = {
    "sh": ["sh", "-c", '"$0" "$@"; exit $?'],
    "bash in bash": ["bash", "-c", 'bash -c \'"$0" "$@"; exit $?\' "$0" "$@"; exit $?'],
    "pipe": ["bash", "-c", '"$0" "$@" | (trap "" TERM; cat); exit $?'],
    "python": [sys.executable, "-c", RUNS],
    "trap": ["bash", "-c", 'trap "exit 0" TERM; "$0" "$@" & wait'],
}


@pytest.mark.parametrize("by_scheduler", [False, True], ids=["order", "scheduler"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_child_of_a_wrapper_has_the_whole_grace_time(warm: Warm, wrapper: str, by_scheduler: bool) -> None:
    """SIGTERM to the group ends the wrapper, but not a program that saves. A scheduler's SIGTERM precedes the order."""
    pids = warm.start(warm.rank(0, [*WRAPPERS[wrapper], sys.executable, "-c", SAVES]))
    warm.wait_for_output(0)
    by_scheduler = by_scheduler and wrapper != "trap"  # its 0 would be the regular end of the rank
    if by_scheduler:
        os.killpg(pids[0], signal.SIGTERM)
        warm.end_of(0)
    warm.tell({"do": "stop", "grace_s": 1000.0})
    if not by_scheduler:
        warm.end_of(0)
    (warm.folder / "go").touch()
    assert warm.next("swept")["left"] == []
    assert (warm.folder / "saved").exists()


def gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_what_a_failed_program_leaves_behind_is_killed_after_the_grace(warm: Warm) -> None:
    """Its regular end kills the rest of its group at once."""
    script = '"$0" -c "$1" & until [ -e ready ]; do sleep 0.01; done; exit $2'
    code = STUBBORN + "open('ready', 'w').close(); time.sleep(1000)"
    pids = warm.start(warm.rank(0, ["bash", "-c", script, sys.executable, code, "3"]), warm.rank(1, SLEEP))
    assert warm.end_of(0)[0]["code"] == 3
    assert not gone(pids[0])
    warm.tell({"do": "stop", "grace_s": 0.1})
    assert warm.end_of(1)[0]["sent"] == "SIGTERM"
    assert warm.next("swept")["left"] == []
    assert gone(pids[0])
    (warm.folder / "ready").unlink()
    pids = warm.start(warm.rank(0, ["bash", "-c", script, sys.executable, code, "0"]), warm.rank(1, SLEEP), attempt=1)
    assert warm.end_of(0)[0]["code"] == 0
    wait_until(lambda: gone(pids[0]), "the end of its group")
    assert warm.stop(1)["left"] == []


def test_a_session_that_ignores_term_outlives_its_shell_until_it_has_saved(warm: Warm) -> None:
    """A scheduler's SIGTERM to all processes ends the shell. The rank has not ended before its session has."""
    shell = ["bash", "-c", '"$0" "$@"; exit $?']
    pids = warm.start(*(warm.rank(rank, [*shell, *PROGRAM, "deaf"]) for rank in range(3)))
    for rank in range(3):
        warm.wait_for_output(rank)
        warm.next("report")
    os.kill(pids[2], signal.SIGKILL)  # a failure
    assert warm.end_of(2)[0]["signal"] == "SIGKILL"
    for pid in (pids[0], pids[1]):
        os.killpg(pid, signal.SIGTERM)
    wait_until(lambda: not any(map(start_ticks, pids.values())), "the end of the shells")
    assert warm.looked().keys() == {0, 1}
    warm.tell({"do": "hold"})
    wait_until(lambda: [each["held"] for each in warm.looked().values()] == [3, 3], "both ranks to hold")
    warm.tell({"do": "stop_at", "steps": 4})
    assert [(end["signal"], end["steps"]) for end in warm.end_of(0, 1)] == [("SIGTERM", 3)] * 2
    assert warm.stop()["left"] == []
