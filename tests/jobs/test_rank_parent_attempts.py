"""A rank parent between ranks and agent: what it passes on, what it sees, and attempt after attempt in one life."""

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.node.page import NEVER
from muster.launch.common.processes import start_ticks
from support.live import wait_until
from support.warm import DEAF, ESCAPES, SLEEP, Warm, state_of

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow]

RUNS = """
import time
from muster.jobs.node import page
from muster.jobs.node.page import Phase
page.own.enter(Phase.RUN)
page.own.step_done(12, 0.5)
print("ready")
time.sleep(1000)
"""
DRAINS = """
import sys, time
from muster.jobs.node import page
page.own.step_done(3, 0.001)
print("ready")
while not page.own.hold:
    time.sleep(0.001)
page.own.held = page.own.steps
while page.own.stop_at < 0:
    time.sleep(0.001)
print("stop at", page.own.stop_at)
sys.exit(75)
"""
ADOPTED = """
import sys
from muster.jobs.node import orders, page
from muster.jobs.node.rank_start import become_another
orders.own.listen()
print("ready")
order = orders.own.next(20.0)
become_another(order)
print(f"rank {order['rank']}, hold {page.own.hold}, {page.own.steps} steps")
sys.exit(0)
"""
LATE = """
import os, sys
from muster.jobs.hosts import ranks
from muster.jobs.node import orders, rank_start
from muster.jobs.node.rank_start import become_another
reporter = rank_start.Reporter(os.environ)
reporter.attempt = 0
orders.own.listen()
print("ready")
order = orders.own.next(20.0)
reporter.joined()
reporter.saved(step=5, checkpoint="step-00000005.a000", stall_s=0.0, seconds=0.1, nbytes=1)
reporter.attempt = 1
reporter.arrived()
sys.exit(0)
"""
POWERLESS = """
import socket, sys
from muster.jobs.node import rank_parent
from muster.jobs.machine import linux
send = linux.kill_quietly
linux.kill_quietly = lambda pid, number, group=False: None if number == 9 else send(pid, number, group=group)
rank_parent.KILL_S = 0.3
rank_parent.RankParent(socket.socket(fileno=int(sys.argv[1]))).run()
"""
# A mutex taken twice: no signal ends that wait, as one would end the C library's sleep.
HOLDS_THE_LOCK = """
import ctypes
c = ctypes.PyDLL(None)
mutex = ctypes.create_string_buffer(64)
c.pthread_mutex_lock(mutex)
print("ready")
c.pthread_mutex_lock(mutex)
"""


def give_store(warm: Warm, attempt: int) -> int:
    """Hand a bound socket to the rank parent, as the store's; return its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        order = b'{"do": "store", "attempt": %d}\n' % attempt
        socket.send_fds(warm.agents[0], [order], [listening.fileno()])
        port: int = listening.getsockname()[1]
        return port


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5.0):
            return True
    except ConnectionRefusedError:
        return False


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


# What ranks and rank parent share ---------------------------------------------------------------------------------


def test_a_look_says_how_far_every_rank_is(warm: Warm) -> None:
    warm.start(warm.rank(3, code=RUNS), warm.rank(4, SLEEP))
    warm.wait_for_output(3)
    nothing = {"phase": "start", "steps": 0, "beats": 0, "slowest_s": 0.0, "held": NEVER, "session": False}
    assert warm.looked() == {
        3: {"phase": "run", "steps": 12, "beats": 2, "slowest_s": 0.5, "held": NEVER, "session": True},
        4: nothing,  # a program that has opened no session
    }


def test_ranks_hold_and_then_hear_after_which_step_to_end(warm: Warm) -> None:
    warm.start(warm.rank(0, code=DRAINS), warm.rank(1, code=DRAINS))
    warm.wait_for_output(0)
    warm.wait_for_output(1)
    assert [seen["held"] for seen in warm.looked().values()] == [NEVER, NEVER]
    warm.tell({"do": "hold"})
    wait_until(lambda: [seen["held"] for seen in warm.looked().values()] == [3, 3], "both ranks to hold")
    warm.tell({"do": "stop_at", "steps": 4})
    records = warm.end_of(0, 1)
    assert [(record["code"], record["sent"], record["steps"]) for record in records] == [(75, None, 3)] * 2
    assert warm.out(0).read_text() == warm.out(1).read_text() == "ready\nstop at 4\n"


def test_a_rank_continues_as_another_and_the_others_end(warm: Warm) -> None:
    pids = warm.start(warm.rank(0, code=ADOPTED), warm.rank(1, code=ADOPTED))
    warm.wait_for_output(0)
    warm.wait_for_output(1)
    warm.tell({"do": "hold"})
    again = {**warm.rank(0, code=ADOPTED), "adopt": 1, "out": str(warm.out(7)), "err": str(warm.err(7))}
    assert warm.start({**again, "steps": 2}, {**again, "rank": 1, "adopt": 5}, attempt=1) == {0: pids[1]}
    (gone,) = warm.end_of(1)  # rank 5 of the last attempt, which was to become rank 1, does not exist
    assert (gone["attempt"], gone["signal"], gone["sent"]) == (1, "SIGKILL", None)
    assert warm.end_of(0)[0]["code"] == 0
    assert warm.out(7).read_text() == "rank 0, hold 0, 2 steps\n"
    wait_until(lambda: start_ticks(pids[0]) is None, "the end of the rank that does not continue")


def test_a_rank_that_died_before_the_others_go_back_to_a_checkpoint_has_its_steps(warm: Warm) -> None:
    pids = warm.start(warm.rank(0, code=ADOPTED), warm.rank(1, code=RUNS))
    warm.wait_for_output(0)
    warm.wait_for_output(1)
    os.kill(pids[1], signal.SIGKILL)
    assert warm.end_of(1)[0]["steps"] == 12
    adopted = [{**warm.rank(rank, code=ADOPTED), "adopt": rank, "steps": 10} for rank in range(2)]
    assert warm.start(*adopted, attempt=1) == {0: pids[0]}
    assert warm.next("exited")["steps"] == 10
    assert warm.end_of(0)[0]["code"] == 0


def test_a_late_report_of_the_last_attempt_does_not_count_for_this_one(warm: Warm) -> None:
    warm.start(warm.rank(0, code=LATE))
    warm.wait_for_output(0)
    warm.start({**warm.rank(1, code=LATE), "adopt": 0}, attempt=1)
    saved, arrived = (warm.next("report")["report"] for _ in range(2))
    assert (saved["report"], arrived) == ("saved", {"report": "arrived"})  # what is on the disk counts
    assert warm.end_of(1)[0]["code"] == 0


def test_joiners_of_an_earlier_attempt_end_before_those_of_a_later_one_start(warm: Warm) -> None:
    first, second = ({"do": "start", "joins": True, "attempt": n, "ranks": [warm.rank(4 - n, SLEEP)]} for n in (1, 2))
    orders = (first, {"do": "stop", "attempt": 1, "grace_s": 60.0}, second)
    warm.agents[0].sendall("".join(f"{json.dumps(order)}\n" for order in orders).encode())
    ((_, before),) = warm.next("started")["started"]
    again = warm.next("started")
    ((rank, pid),) = again["started"]
    assert (again["attempt"], rank) == (2, 2)
    wait_until(lambda: start_ticks(before) is None, "the end of the first")
    assert warm.looked().keys() == {2}
    assert start_ticks(pid) is not None
    warm.stop(2)


def test_how_far_a_rank_came_is_told_with_its_end_however_it_ended(warm: Warm) -> None:
    pids = warm.start(warm.rank(0, code=RUNS))
    warm.wait_for_output(0)
    os.kill(pids[0], signal.SIGKILL)
    assert warm.end_of(0)[0]["steps"] == 12


def test_asked_for_its_stacks_a_rank_writes_them_whatever_it_does(warm: Warm) -> None:
    """One waits, one stands still, one holds the interpreter's lock in a call of C."""
    pids = warm.start(warm.rank(0, code=RUNS), warm.rank(1, code=RUNS), warm.rank(2, code=HOLDS_THE_LOCK))
    for rank in (0, 1, 2):
        warm.wait_for_output(rank)
    os.kill(pids[1], signal.SIGSTOP)
    for rank, state in enumerate("STS"):  # a rank that is ready is about to wait
        wait_until(lambda rank=rank, state=state: state_of(pids[rank]) == state, f"rank {rank} to be in state {state}")
    warm.tell({"do": "dump"})
    assert warm.next("dumped")["dumped"] == {"0": "S", "1": "T", "2": "S"}
    for rank in (0, 1, 2):
        wait_until(lambda rank=rank: "in _call" in warm.err(rank).read_text(), f"the stack of rank {rank}")
        assert 'File "<string>", line ' in warm.err(rank).read_text()
    assert all(map(start_ticks, pids.values()))


def test_a_rank_that_was_forked_only_just_now_does_not_die_of_being_asked_for_its_stacks(warm: Warm) -> None:
    code = "import time; time.sleep(0.2)"
    for _ in range(5):
        warm.tell({"do": "start", "attempt": 0, "ranks": [warm.rank(rank, code=code) for rank in range(4)]})
        warm.tell({"do": "dump"})
        warm.next("started")
        warm.next("dumped")
        assert [record["signal"] for record in warm.end_of(0, 1, 2, 3)] == [None] * 4


def test_a_program_of_the_users_is_not_sent_what_it_might_die_of(warm: Warm) -> None:
    pids = warm.start(warm.rank(0, SLEEP))
    wait_until(lambda: state_of(pids[0]) == "S", "the program to sleep")
    os.kill(pids[0], signal.SIGSTOP)
    wait_until(lambda: state_of(pids[0]) == "T", "the program to stand still")
    warm.tell({"do": "dump"})
    assert warm.next("dumped")["dumped"] == {"0": "T"}
    assert state_of(pids[0]) == "T"
    assert warm.stop(0)["swept"] == 0


def test_with_no_ranks_there_is_nothing_to_see_or_to_pass_on(warm: Warm) -> None:
    for order in ({"do": "hold"}, {"do": "stop_at", "steps": 3}, {"do": "dump"}):
        warm.tell(order)
    assert warm.next("dumped")["dumped"] == {}
    assert warm.looked() == {}


# Attempt after attempt ------------------------------------------------------------------------------------------------


def test_attempts_follow_one_another_with_nothing_left_of_the_one_before(warm: Warm) -> None:
    (rank_parent,) = warm.rank_parents
    files = open_files(rank_parent)
    held: list[Any] = []
    for attempt in range(3):
        pids = warm.start(warm.rank(0, code=ESCAPES + "time.sleep(1000)"), warm.rank(1, code=RUNS), attempt=attempt)
        warm.wait_for_output(0, "ready\n" * (attempt + 1))
        warm.wait_for_output(1, "ready\n" * (attempt + 1))
        held.append(warm.looked()[1]["held"])
        warm.tell({"do": "hold"})  # the next attempt must not hold for this one's sake
        assert warm.stop(0, 1) == {"swept": 2, "left": [], "attempt": attempt}
        assert warm.left() == [warm.process.pid, rank_parent]
        assert not any(map(start_ticks, pids.values()))
        assert open_files(rank_parent) == files
    assert held == [NEVER] * 3


def test_the_grace_of_one_attempt_does_not_end_the_next(warm: Warm) -> None:
    warm.start(warm.rank(0, SLEEP), attempt=0)
    warm.stop(0, grace_s=0.3)
    pids = warm.start(warm.rank(0, code=DEAF), attempt=1)
    warm.wait_for_output(0)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        warm.looked()
    assert start_ticks(pids[0]) is not None
    assert warm.stop(0)["attempt"] == 1


def test_every_message_of_an_attempt_carries_its_number(warm: Warm) -> None:
    reports = "import os; from muster.jobs.node.reports import Reporter; Reporter(os.environ).arrived()"
    for attempt in (4, 7):
        warm.tell({"do": "start", "attempt": attempt, "ranks": [warm.rank(0, code=reports)]})
        kinds = [warm.next(kind) for kind in ("started", "report", "exited")]
        warm.tell({"do": "look"})
        warm.tell({"do": "dump"})
        warm.tell({"do": "stop", "grace_s": 0.0})
        kinds += [warm.next(kind) for kind in ("looked", "dumped", "swept")]
        assert [each["attempt"] for each in kinds] == [attempt] * 6


def test_each_attempt_has_a_store_of_its_own(make_warm) -> None:
    warm = make_warm(preload="torch").wait_for_rank_parents()
    ports = []
    for attempt in (0, 1):
        ports.append(give_store(warm, attempt))
        warm.start(warm.rank(0, SLEEP), attempt=attempt)
        wait_until(lambda: len(warm.left()) == 4, "warm process, rank parent, store and rank")
        assert answers(ports[-1])
        assert warm.stop(0)["swept"] == 1
        assert not answers(ports[-1])


def test_a_store_whose_attempt_nobody_stopped_ends_with_the_next_one(make_warm) -> None:
    warm = make_warm(preload="torch").wait_for_rank_parents()
    first = give_store(warm, 0)
    warm.start(warm.rank(0, ["true"]), attempt=0)
    warm.end_of(0)
    assert answers(first)
    second = give_store(warm, 1)
    warm.start(warm.rank(0, SLEEP), attempt=1)
    wait_until(lambda: not answers(first), "the end of the first store")
    assert answers(second)
    assert warm.stop(0)["attempt"] == 1


def test_the_end_of_the_store_is_told_as_one_that_another_attempt_may_mend(make_warm) -> None:
    warm = make_warm(preload="torch").wait_for_rank_parents()
    give_store(warm, 2)
    pids = warm.start(warm.rank(0, SLEEP), attempt=2)
    wait_until(lambda: len(warm.left()) == 4, "warm process, rank parent, store and rank")
    (store,) = set(warm.left()) - {warm.process.pid, *warm.rank_parents, *pids.values()}
    os.kill(store, signal.SIGKILL)
    assert warm.next("broken") == {"broken": "the store process ended with code -9", "code": 76, "attempt": 2}
    assert warm.stop(0)["attempt"] == 2


def test_a_start_while_ranks_run_is_refused_and_hurts_nobody(warm: Warm) -> None:
    warm.start(warm.rank(0, SLEEP), attempt=0)
    warm.tell({"do": "start", "attempt": 1, "ranks": [warm.rank(0, ["true"])]})
    broken = warm.next("broken")
    assert broken["broken"] == "attempt 1 cannot start while ranks of attempt 0 are running"
    assert (broken["code"], broken["attempt"]) == (76, 0)
    assert warm.stop(0)["attempt"] == 0


# What would not die ---------------------------------------------------------------------------------------------------


def test_a_rank_that_cannot_be_killed_is_told_and_the_next_attempt_starts(make_warm) -> None:
    """As one that waits for a dead disk; here it is a rank parent whose KILL reaches nobody."""
    warm = make_warm(code=POWERLESS).wait_for_rank_parents()
    pids = warm.start(warm.rank(5, code=DEAF), warm.rank(6, SLEEP), attempt=0)
    warm.wait_for_output(5)
    wait_until(lambda: state_of(pids[5]) == "S", "rank 5 to wait")
    warm.tell({"do": "stop", "grace_s": 0.0})
    assert warm.next("exited")["exited"] == 6
    swept = warm.next("swept")
    assert [(each["pid"], each["rank"], each["state"]) for each in swept["left"]] == [(pids[5], 5, "S")]
    warm.start(warm.rank(7, SLEEP), attempt=1)
    os.kill(pids[5], signal.SIGKILL)  # what it waited for has come back: nobody is told, nobody minds
    wait_until(lambda: start_ticks(pids[5]) is None, "the end of rank 5")  # or it would be swept with what is left
    assert warm.stop(7) == {"swept": 0, "left": [], "attempt": 1}


def test_a_second_stop_does_not_give_up_earlier_what_has_only_just_been_killed(make_warm) -> None:
    warm = make_warm(code=POWERLESS).wait_for_rank_parents()
    began = time.monotonic()
    warm.start(warm.rank(0, code=DEAF))
    warm.wait_for_output(0)
    for _ in range(3):
        warm.tell({"do": "stop", "grace_s": 0.0})
    assert len(warm.next("swept")["left"]) == 1
    assert time.monotonic() - began >= 0.3  # KILL_S there
