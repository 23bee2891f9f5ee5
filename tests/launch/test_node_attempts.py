"""Attempts on one node: its agent, rank parent and warm process stay; ranks, store and files are new."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.jobs.node.page import NEVER
from muster.launch.common.processes import start_ticks
from muster.launch.wire.messages import (
    Beat,
    Broken,
    Dump,
    Exited,
    File,
    Heartbeat,
    Held,
    Hold,
    Log,
    Prepare,
    Prepared,
    Ready,
    Stacks,
    Started,
    StopAt,
    StopRanks,
    Swept,
)
from muster.launch.wire.records import Progress
from support.agents import LOOPBACK, Supervised, program, rank
from support.live import parent_of, wait_until
from support.warm import state_of

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow]

SLEEPS = "import os, time\nprint('ready')\ntime.sleep(1000)"
RUNS = """
import time
from muster.jobs.node import page
page.own.enter(page.Phase.RUN)
page.own.step_done(5, 0.25)
print("ready")
time.sleep(1000)
"""
HOLDS = """
import sys, time
from muster.jobs.node import page
page.own.enter(page.Phase.RUN)
page.own.step_done(5, 0.25)
print("ready")
while not page.own.hold:
    time.sleep(0.001)
page.own.held = 5
while page.own.stop_at < 0:
    time.sleep(0.001)
print("stop at", page.own.stop_at)
sys.exit(75)
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Supervised]:
    """An agent with a run folder."""
    started = Supervised(tmp_path)
    yield started
    started.hang_up()
    started.end()
    started.close()


def pids_of(started: Started) -> dict[int, int]:
    return {number: pid for number, pid, _ in started.ranks}


def accepts(port: int) -> bool:
    try:
        with socket.create_connection((LOOPBACK, port), timeout=5.0):
            return True
    except ConnectionRefusedError:
        return False


# Attempts -------------------------------------------------------------------------------------------------------------


def test_the_next_attempt_has_the_same_rank_parent_and_nothing_of_the_last_one(node: Supervised) -> None:
    node.order_start(0, rank(0, SLEEPS))
    node.next(Ready)
    first = pids_of(node.next(Started))
    node.wait_for_output(0, 0)
    assert node.stop(0) == Swept(0, 0, ())
    assert start_ticks(first[0]) is None
    second = node.start(1, rank(0, SLEEPS), rank(1, SLEEPS))
    node.wait_for_output(1, 1)
    rank_parents = {parent_of(pid) for pid in second.values()}
    assert len(rank_parents) == 1
    record = json.loads(node.attempt_dir(1).node(0).read_text())
    assert [(each["rank"], each["pid"]) for each in record["ranks"]] == list(second.items())
    node.send(StopRanks(1, 0.0))
    ended = [node.next(Exited) for _ in second]
    assert sorted((each.rank, each.attempt, each.signal) for each in ended) == [
        (0, 1, "SIGTERM"),
        (1, 1, "SIGTERM"),
    ]
    assert node.next(Swept).attempt == 1


def test_each_attempt_has_a_store_that_serves_its_ranks(node: Supervised) -> None:
    """And torch is imported once: a rank of the second attempt is a fork of the process that has it."""
    code = """
import os, sys, time
assert "torch" in sys.modules
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(os.environ["PORT"]), is_master=False)
print(store.check(["key"]), end=" ")
store.set("key", "value")
print(store.get("key").decode())
time.sleep(1000)
"""
    ports, readies = [], 0
    for attempt in (0, 1):
        node.send(Prepare(attempt, LOOPBACK))
        prepared = node.next(Prepared)
        assert (prepared.attempt, prepared.bound) == (attempt, LOOPBACK)
        ports.append(prepared.port)
        warm = {"preload": "torch,torch.distributed", "env": {}, "python": []}
        one = {**rank(0, code), "env": {"PORT": str(ports[-1])}}
        node.order_start(attempt, one, store=True, warm=warm)
        while not isinstance(message := node.receive(), Started):
            readies += isinstance(message, Ready)
        node.wait_for_output(attempt, 0, "False value\n")
        assert node.stop(attempt).swept == 1
        assert not accepts(ports[-1])
    assert readies == 1


def test_what_a_node_sends_home_is_the_attempts_own(node: Supervised) -> None:
    for attempt in (0, 1):
        said = f"print('of attempt {attempt}'); raise SystemExit"
        node.order_start(attempt, rank(0, said), apart=True, console=(0,), node=3)
        seen = []  # all of it: what the rank writes may come before it is known to have started
        while not isinstance(message := node.receive(), Exited):
            seen.append(message)
        names = {each.name for each in seen if isinstance(each, File)}
        assert names == {f"attempt-00{attempt}/node-03.json", f"attempt-00{attempt}/rank-00000.out"}
        assert b"".join(each.data for each in seen if isinstance(each, File) and each.name.endswith(".out")) == (
            f"of attempt {attempt}\n".encode()
        )
        assert [each.lines for each in seen if isinstance(each, Log)] == [(f"of attempt {attempt}",)]
        assert {each.attempt for each in seen} == {attempt}
        assert (message.attempt, message.last_lines) == (attempt, (f"of attempt {attempt}",))
        node.stop(attempt)


def test_an_attempt_that_ended_by_itself_is_followed_by_the_next_without_a_stop(node: Supervised) -> None:
    for attempt in (0, 1):
        node.start(attempt, program(0, "true"))
        exited = node.next(Exited)
        assert (exited.attempt, exited.code, exited.steps) == (attempt, 0, None)


def test_a_stop_before_the_start_is_of_that_attempt_and_frees_the_port(node: Supervised) -> None:
    node.start(0, program(0, "true"))
    node.next(Exited)
    node.stop(0)
    node.send(Prepare(1, LOOPBACK))
    port = node.next(Prepared).port
    assert accepts(port)
    assert node.stop(1) == Swept(1, 0, ())
    assert not accepts(port)


def test_a_stop_of_an_attempt_that_never_came_here_is_answered_at_once(node: Supervised) -> None:
    pids = node.start(0, rank(0, SLEEPS))
    assert node.stop(4).attempt == 4
    assert start_ticks(pids[0]) is not None
    assert node.stop(0).attempt == 0


def test_a_port_that_is_prepared_twice_is_the_second_one(node: Supervised) -> None:
    ports = []
    for attempt in (0, 0, 1):
        node.send(Prepare(attempt, LOOPBACK))
        ports.append(node.next(Prepared).port)
    assert [accepts(port) for port in ports] == [False, False, True]


def test_setup_lines_run_once_on_a_node_and_a_stop_ends_those_of_any_attempt(node: Supervised) -> None:
    lines = ("echo once >> count", "export MODE=fast LANG=x", "unset HOME")
    said = program(0, "bash", "-c", "echo $MODE $LANG ${HOME-none}")
    for attempt in (0, 1):
        node.start(attempt, said, setup=lines)
        node.next(Exited)
        node.stop(attempt)
        assert node.attempt_dir(attempt).out(0).read_text() == "fast x none\n"
    assert (node.folder / "count").read_text() == "once\n"
    node.order_start(2, program(0, "true"), setup=("touch begun", "sleep 1000"))
    wait_until((node.folder / "begun").exists, "the setup lines")
    assert node.stop(2) == Swept(2, 0, ())
    node.start(3, program(0, "true"), setup=lines)  # others have not been run to their end in between
    assert node.next(Exited).code == 0


def test_the_start_of_a_newer_attempt_ends_one_that_is_still_pending(node: Supervised) -> None:
    shells = []
    for attempt in (1, 2):  # joiners, whose setup lines still run
        begun = node.folder / f"begun{attempt}"
        lines = (f"echo $$ > {begun}.part && mv {begun}.part {begun}", "sleep 1000")
        node.order_start(attempt, program(attempt, "sleep", "1000"), setup=lines, joins=True)
        wait_until(begun.exists, "the setup lines")
        shells.append(int(begun.read_text()))
    assert node.start(3, program(7, "sleep", "1000"), joins=True).keys() == {7}
    assert node.start(3, program(8, "sleep", "1000"), joins=True).keys() == {7, 8}  # besides the first
    assert [start_ticks(pid) for pid in shells] == [None, None]
    node.stop(3)


def test_a_rank_parent_that_died_takes_its_ranks_along_and_the_next_attempt_has_another(node: Supervised) -> None:
    node.order_start(0, rank(0, SLEEPS))
    rank_parent = node.next(Ready).pid
    (pid,) = pids_of(node.next(Started)).values()
    os.kill(rank_parent, signal.SIGKILL)
    while not isinstance(message := node.receive(), Broken):
        pass
    assert (message.gone, message.code, message.attempt) == (True, 69, 0)
    assert node.stop(0) == Swept(0, 0, ())
    assert start_ticks(pid) is None
    node.order_start(1, rank(0, SLEEPS))
    assert node.next(Ready).pid != rank_parent
    assert node.next(Started).attempt == 1
    assert node.stop(1).attempt == 1


# How far the ranks are ------------------------------------------------------------------------------------------------


def progress(node: Supervised) -> Progress | None:
    node.send(Beat(1.0))
    beat = node.next(Heartbeat)
    assert beat.sent == 1.0
    return beat.progress


def test_a_heartbeat_tells_how_far_the_ranks_are(node: Supervised) -> None:
    assert progress(node) is None
    node.start(0, rank(0, SLEEPS), rank(1, RUNS))
    node.wait_for_output(0, 1)
    wait_until(lambda: (progress(node) or {}).get("steps") == 5, "the progress of rank 1")
    told = progress(node)
    assert (told["steps"], told["phases"], told["slowest_s"]) == (5, ("run", "start"), 0.25)
    (stalest, its), (_, other) = told["ranks"].items()
    assert (stalest, its["phase"], its["steps"]) == ("0", "start", 0)
    assert its["beats_age_s"] >= told["beats_age_s"] == other["beats_age_s"] >= 0
    node.stop(0)
    ended = progress(node)
    assert (ended["steps"], ended["phases"], ended["ranks"]) == (5, (), {})
    node.start(1, rank(0, SLEEPS))
    wait_until(lambda: progress(node) is not None, "a look")
    assert progress(node)["steps"] == 0
    node.stop(1)


def test_programs_of_the_users_have_no_progress(node: Supervised) -> None:
    node.start(0, program(0, "sleep", "1000"))
    wait_until(lambda: progress(node), "a look at the program")
    told = progress(node)
    assert (told["phases"], told["sessions"], told["output_age_s"]) == (("start",), 0, None)
    node.stop(0)


def test_ranks_that_are_asked_to_hold_are_told_once_and_then_hear_where_to_stop(node: Supervised) -> None:
    node.start(0, rank(0, HOLDS), rank(1, HOLDS))
    node.wait_for_output(0, 0)
    node.wait_for_output(0, 1)
    node.send(Hold(0))
    assert node.next(Held) == Held(0, 5)
    node.send(StopAt(0, 6))
    seen = []
    while sum(isinstance(message, Exited) for message in seen) < 2:
        seen.append(node.receive())
    assert [(each.code, each.steps) for each in seen if isinstance(each, Exited)] == [(75, 5)] * 2
    assert not [each for each in seen if isinstance(each, Held)]
    assert node.attempt_dir(0).out(1).read_text() == "ready\nstop at 6\n"
    assert NEVER == -1  # which is no number of steps


def test_asked_for_them_a_node_sends_the_stacks_of_its_ranks_and_their_states(node: Supervised) -> None:
    pids = node.start(0, rank(0, RUNS), rank(1, RUNS))
    node.wait_for_output(0, 0)
    node.wait_for_output(0, 1)
    wait_until(lambda: (progress(node) or {}).get("steps") == 5, "a look")
    os.kill(pids[1], signal.SIGSTOP)
    for each, state in enumerate("ST"):  # a rank that is ready is about to wait
        wait_until(lambda each=each, state=state: state_of(pids[each]) == state, f"rank {each} to be in state {state}")
    node.send(Dump(0))
    stacks = node.next(Stacks)
    assert (stacks.attempt, sorted(each["rank"] for each in stacks.ranks)) == (0, [0, 1])
    for number, state in ((0, "S"), (1, "T")):
        (told,) = (each for each in stacks.ranks if each["rank"] == number)
        assert (told["state"], told["phase"], told["steps"]) == (state, "run", 5)
        assert told["lines"][0].endswith("(most recent call first):")
        assert told["lines"][1] == '  File "<string>", line 7 in <module>'
    node.stop(0)


def test_a_node_without_ranks_answers_that_it_has_no_stacks(node: Supervised) -> None:
    node.send(Dump(0))
    assert node.next(Stacks) == Stacks(0, ())


def test_a_node_whose_rank_parent_stands_still_answers_without_stacks(node: Supervised) -> None:
    node.order_start(0, rank(0, SLEEPS))
    rank_parent = node.next(Ready).pid
    node.next(Started)
    os.kill(rank_parent, signal.SIGSTOP)
    node.send(Dump(0))
    assert node.next(Stacks).ranks == ()
    os.kill(rank_parent, signal.SIGCONT)
    assert node.stop(0).attempt == 0
