"""The rank parent and its warm process, as an agent sees them: real processes, commanded over a socket."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from muster.launch.common.processes import start_ticks
from support.live import wait_until
from support.warm import DEADLINE_S, DEAF, ESCAPES, SLEEP, Warm, state_of

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow]

NOTHING_SWEPT = {"swept": 0, "left": [], "attempt": 0}


# How ranks end --------------------------------------------------------------------------------------------------------


def test_every_end_is_told_once_with_its_code_or_signal_and_time(warm: Warm) -> None:
    began = time.time()
    pids = warm.start(
        warm.rank(4, ["true"]),
        warm.rank(5, ["bash", "-c", "exit 3"]),
        warm.rank(6, ["bash", "-c", "kill -SEGV $$"]),
        warm.rank(7, code="raise SystemExit(9)"),
        warm.rank(8, code="raise ValueError('mine')"),
    )
    assert sorted(pids) == [4, 5, 6, 7, 8]
    records = warm.end_of(4, 5, 6, 7, 8)
    assert [record["code"] for record in records] == [0, 3, None, 9, 1]
    assert [record["signal"] for record in records] == [None, None, "SIGSEGV", None, None]
    assert all(record["sent"] is None for record in records)
    assert [record["failure"].get("message") for record in records] == [None, None, None, None, "mine"]
    assert all(began <= record["ended"] <= time.time() for record in records)
    assert "ValueError: mine" in warm.err(8).read_text()
    assert not any(map(start_ticks, pids.values()))


def test_a_rank_that_hears_term_is_stopped_at_once_and_a_deaf_one_is_killed_after_the_grace(warm: Warm) -> None:
    warm.start(warm.rank(0, code=DEAF), warm.rank(1, SLEEP))
    warm.wait_for_output(0)
    stopped_at = time.time()
    warm.tell({"do": "stop", "grace_s": 0.4})
    first, second = warm.next("exited"), warm.next("exited")
    assert {**first, "ended": 0.0} == {
        "exited": 1,
        "code": None,
        "signal": "SIGTERM",
        "sent": "SIGTERM",
        "ended": 0.0,
        "failure": {},
        "steps": None,
        "attempt": 0,
    }
    assert (second["exited"], second["signal"], second["sent"]) == (0, "SIGKILL", "SIGKILL")
    assert second["ended"] - stopped_at >= 0.4
    assert warm.next("swept") == NOTHING_SWEPT


def test_a_second_stop_can_only_shorten_the_grace(warm: Warm) -> None:
    warm.start(warm.rank(0, code=DEAF))
    warm.wait_for_output(0)
    for grace_s in (1000.0, 0.0, 1000.0):
        warm.tell({"do": "stop", "grace_s": grace_s})
    assert warm.end_of(0)[0]["signal"] == "SIGKILL"
    assert warm.next("swept") == NOTHING_SWEPT


def test_a_frozen_rank_still_hears_that_it_is_to_stop(warm: Warm) -> None:
    code = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
print("ready")
time.sleep(1000)
"""
    pids = warm.start(warm.rank(0, code=code))
    warm.wait_for_output(0)
    os.kill(pids[0], signal.SIGSTOP)
    warm.tell({"do": "stop", "grace_s": 1000.0})
    (record,) = warm.end_of(0)
    assert (record["code"], record["signal"], record["sent"]) == (7, None, "SIGTERM")


def test_a_rank_that_had_died_by_itself_when_the_order_to_stop_came_does_not_look_stopped(warm: Warm) -> None:
    """Both waited for the rank parent: the order was read first, and the signal of the dead rank counted as our own."""
    code = "import time; print('ready'); time.sleep(1000)"
    pids = warm.start(warm.rank(0, code=code), warm.rank(1, code=code))
    warm.wait_for_output(0)
    warm.wait_for_output(1)
    (rank_parent,) = warm.rank_parents
    wait_until(lambda: state_of(rank_parent) == "S", "the rank parent to wait")
    os.kill(rank_parent, signal.SIGSTOP)
    wait_until(lambda: state_of(rank_parent) == "T", "the rank parent to stand still")
    os.kill(pids[0], signal.SIGTERM)
    wait_until(lambda: start_ticks(pids[0]) is None, "the end of rank 0")
    warm.tell({"do": "stop", "grace_s": 5.0})
    os.kill(rank_parent, signal.SIGCONT)
    died, stopped = warm.end_of(0, 1)
    assert (died["signal"], died["sent"]) == ("SIGTERM", None)
    assert (stopped["signal"], stopped["sent"]) == ("SIGTERM", "SIGTERM")


def test_an_order_to_stop_right_behind_the_order_to_start_reaches_every_rank(warm: Warm) -> None:
    """A rank made its group itself, and so the signal to a group that was not there yet was lost."""
    (core, *_) = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(warm.rank_parents[0], [core])  # so that it goes on while what it forks has to wait
    os.sched_setscheduler(warm.rank_parents[0], os.SCHED_BATCH, os.sched_param(0))
    starts = [warm.rank(rank, SLEEP) for rank in range(16)]
    orders = [{"do": "start", "ranks": starts}, {"do": "stop", "grace_s": 1000.0}]
    warm.agents[0].sendall("".join(json.dumps(order) + "\n" for order in orders).encode())
    warm.next("started")
    assert [(record["signal"], record["sent"]) for record in warm.end_of(*range(16))] == [("SIGTERM", "SIGTERM")] * 16


def test_stopping_when_nothing_runs_is_answered(warm: Warm) -> None:
    warm.tell({"do": "stop", "grace_s": 5.0})
    assert warm.next("swept") == NOTHING_SWEPT


# What ranks leave behind ----------------------------------------------------------------------------------------------


def test_what_a_stopped_rank_leaves_behind_is_swept_and_counted(warm: Warm) -> None:
    warm.start(warm.rank(0, code=ESCAPES + "time.sleep(1000)"))
    warm.wait_for_output(0)
    assert len(warm.left()) == 5  # warm, rank parent, rank, and two that escaped
    warm.tell({"do": "stop", "grace_s": 0.0})
    warm.end_of(0)
    assert warm.next("swept") == {**NOTHING_SWEPT, "swept": 2}
    assert len(warm.left()) == 2


def test_what_a_rank_leaves_behind_when_it_is_done_is_killed_without_an_order(warm: Warm) -> None:
    warm.start(warm.rank(0, code=ESCAPES), warm.rank(1, ["true"]))
    warm.end_of(0, 1)
    wait_until(lambda: len(warm.left()) == 2, "the end of all but warm process and rank parent")
    warm.start(warm.rank(2, ["true"]))  # and it goes on
    assert warm.end_of(2)[0]["code"] == 0


def test_the_group_of_a_rank_that_ended_is_killed_while_others_run(warm: Warm) -> None:
    pids = warm.start(warm.rank(0, ["bash", "-c", "sleep 1000 & echo $!"]), warm.rank(1, SLEEP))
    warm.end_of(0)
    child = int(warm.out(0).read_text())
    wait_until(lambda: start_ticks(child) is None, "the end of the child")
    assert start_ticks(pids[1]) is not None


@pytest.mark.parametrize("how", ["close", "kill the agent's end"])
def test_when_the_socket_closes_everything_ends_the_stubborn_too(how: str, warm: Warm) -> None:
    warm.start(warm.rank(0, code=ESCAPES + "time.sleep(1000)"), warm.rank(1, SLEEP))
    warm.wait_for_output(0)
    if how == "close":
        warm.close()
    else:
        warm.agents[0].shutdown(socket.SHUT_RDWR)
    assert warm.process.wait(timeout=DEADLINE_S) == 0
    assert warm.left() == []


def test_a_killed_rank_parent_takes_its_ranks_along_and_the_warm_process_buries_what_they_left(make_warm) -> None:
    warm = make_warm(rank_parents=2).wait_for_rank_parents()
    rank_parents = warm.rank_parents
    first = warm.start(warm.rank(0, code=ESCAPES + "time.sleep(1000)"), warm.rank(1, SLEEP))
    second = warm.start(warm.rank(2, SLEEP), rank_parent=1)
    warm.wait_for_output(0)
    os.kill(rank_parents[0], signal.SIGKILL)
    wait_until(
        lambda: sorted(warm.left()) == sorted([warm.process.pid, rank_parents[1], second[2]]), "the others alone"
    )
    assert not any(map(start_ticks, first.values()))
    warm.tell({"do": "stop", "grace_s": 5.0}, rank_parent=1)
    assert warm.end_of(2, rank_parent=1)[0]["signal"] == "SIGTERM"
    os.kill(rank_parents[1], signal.SIGKILL)
    assert warm.process.wait(timeout=DEADLINE_S) == 0
    assert warm.left() == []


def test_ranks_die_with_their_rank_parent_even_where_no_warm_process_is_left_to_bury_them(warm: Warm) -> None:
    pids = warm.start(warm.rank(0, code=DEAF), warm.rank(1, SLEEP))
    warm.wait_for_output(0)
    warm.process.kill()
    warm.process.wait()
    assert all(map(start_ticks, pids.values()))  # the rank parent goes on without it
    os.kill(warm.rank_parents[0], signal.SIGKILL)
    wait_until(lambda: not any(map(start_ticks, pids.values())), "the end of the ranks")


# An import that never ends, in place of torch's.
HANGS = """
import signal, sys
from importlib.abc import MetaPathFinder

class Hangs(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "hangs":
            print("importing", file=sys.stderr, flush=True)
            signal.pause()

sys.meta_path.insert(0, Hangs())
sys.argv = ["muster.jobs.node.warm", "--fds", sys.argv[1], "--preload", "hangs"]
from muster.jobs.node.warm import main
main()
"""


def holds_numpy(pid: int) -> bool:
    """Return whether a process maps numpy's libraries; numpy stands for torch, whose import takes seconds."""
    return "numpy" in Path(f"/proc/{pid}/maps").read_text()


def test_the_warm_process_of_a_single_rank_parent_imports_nothing_so_that_fewer_processes_hold_torch(make_warm) -> None:
    single = make_warm(preload="numpy").wait_for_rank_parents()
    assert [holds_numpy(pid) for pid in (single.process.pid, *single.rank_parents)] == [False, True]
    shared = make_warm(rank_parents=2, preload="numpy").wait_for_rank_parents()  # imported once for both
    assert [holds_numpy(pid) for pid in (shared.process.pid, *shared.rank_parents)] == [True, True, True]


def test_a_rank_parent_whose_import_hangs_dies_with_its_warm_process(make_warm) -> None:
    warm = make_warm(code=HANGS)
    wait_until(lambda: (warm.folder / "warm.err").read_text() == "importing\n", "the import")
    assert len(warm.left()) == 2
    warm.process.kill()
    wait_until(lambda: warm.left() == [], "the end of the rank parent")


def test_a_single_rank_parent_that_cannot_import_says_so_and_ends_with_its_warm_process(make_warm) -> None:
    warm = make_warm(preload="nosuchmodule")
    broken = warm.next("broken")
    assert ("No module named 'nosuchmodule'" in broken["broken"], broken["code"]) == (True, 78)
    warm.agents[0].shutdown(socket.SHUT_RDWR)
    assert warm.process.wait(timeout=DEADLINE_S) == 0
    assert warm.left() == []
