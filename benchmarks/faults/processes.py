"""Faults of processes: killed, stopped, stuck, out of step (rows 1 to 4, 8, 9 and 14 of the matrix)."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from signal import SIGKILL, SIGSTOP

from faults.bench import Bench
from faults.live import Live, resume, signal_all, trains_on
from faults.table import Expected, Fault, Outcome
from faults.work import job

HANG_S = 3.0
HUNG = job(hang_s=HANG_S)
PLAIN = job()
LONG = job(steps=600)


def struck(
    number: signal.Signals, whom: Callable[[Live], Sequence[int]], text: str = PLAIN
) -> Callable[[Bench], Outcome]:
    """Return a row's run: some processes get a signal at step 24."""

    def act(live: Live) -> float:
        pids, began = whom(live), time.time()
        signal_all(pids, number)
        return began

    return lambda bench: bench.hurt(text, act)


def bent(what: str) -> Callable[[Bench], Outcome]:
    """Return a row's run: rank 1 does `what` at loop index 24 of attempt 0."""

    def bent_at(live: Live) -> float:
        """Return the earliest time with which a rank says, on standard error, that it is bent."""
        live.wait_event("attempt_ended", attempt=0, deadline_s=60.0)
        said = (path.read_text(errors="replace") for path in live.run.path.glob("attempt-*/rank-*.err"))
        lines = (line for text in said for line in text.splitlines() if line.startswith("bent: "))
        return min((float(line.rpartition(", ")[2]) for line in lines), default=time.time())

    return lambda bench: bench.hurt(HUNG, bent_at, ready=lambda live: live.wait_step(20), bend=f"{what}:1:24:0")


def supervisor_killed(bench: Bench) -> Outcome:
    """Kill the supervisor; when all is gone, `muster resume`."""
    return bench.hurt(PLAIN, Live.kill, then=resume)


def supervisor_killed_resumed_at_once(bench: Bench) -> Outcome:
    """Kill the supervisor and resume without waiting for its ranks to go: never two attempts at a time."""
    return bench.hurt(PLAIN, lambda live: live.process.kill(), then=resume)


def writer_stopped(bench: Bench) -> Outcome:
    """Stop the helpers that write checkpoints for two seconds: training goes on, saves are left out."""

    def act(live: Live) -> None:
        helpers = live.helpers()
        signal_all(helpers, SIGSTOP)
        trains_on(live, 2.0, "the helpers")
        signal_all(helpers, signal.SIGCONT)

    return bench.hurt(job(steps=300), act)


KILLED = Expected(attempts=2, detect_s=0.5, resume_s=5.0, lost_steps=20)
# A run that lost an agent has a third attempt if it grows back before its end.
LOST = replace(KILLED, attempts=None)
FROZEN = Expected(detect_s=6.5, resume_s=20.0)
HANGS = Expected(attempts=2, detect_s=HANG_S + 2.0, resume_s=HANG_S + 7.0, lost_steps=20)

FAULTS = (
    Fault(1, "rank killed in a collective", "kill -9 rank 1", KILLED, struck(SIGKILL, lambda live: [live.ranks()[1]]),
          quick=True),
    Fault(2, "rank 0 killed", "kill -9 rank 0", KILLED, struck(SIGKILL, lambda live: [live.ranks()[0]]), quick=True),
    Fault(3, "rank stopped", "kill -STOP rank 1", HANGS, struck(SIGSTOP, lambda live: [live.ranks()[1]], HUNG),
          quick=True),
    Fault(3, "rank holds the interpreter's lock", "sleep in C with the GIL", HANGS, bent("gil")),
    Fault(4, "rank never enters a collective", "rank 1 sleeps instead", HANGS, bent("absent"), quick=True),
    Fault(4, "rank skips one reduction and goes on", "rank 1 leaves it out", HANGS, bent("skip")),
    Fault(8, "agent killed", "kill -9 agent of node 1", LOST, struck(SIGKILL, lambda live: live.agents()[1:2]),
          quick=True),
    Fault(8, "agent of node 0 killed", "kill -9 agent of node 0", LOST,
          struck(SIGKILL, lambda live: live.agents()[:1])),
    Fault(8, "rank parent killed", "kill -9 rank parent, node 1", KILLED,
          struck(SIGKILL, lambda live: live.rank_parents()[1:2])),
    Fault(8, "agent frozen", "kill -STOP agent of node 1", FROZEN,
          struck(SIGSTOP, lambda live: live.agents()[1:2], LONG)),
    Fault(8, "supervisor killed", "kill -9, muster resume", Expected(attempts=2), supervisor_killed, quick=True),
    Fault(8, "supervisor killed, resumed at once", "kill -9, muster resume", Expected(attempts=2),
          supervisor_killed_resumed_at_once),
    Fault(9, "store killed", "kill -9 store", Expected(), struck(SIGKILL, lambda live: [live.store()])),
    Fault(9, "store frozen", "kill -STOP store", Expected(), struck(SIGSTOP, lambda live: [live.store()], HUNG)),
    Fault(14, "checkpoint writer stopped 2 s", "kill -STOP helpers", Expected(attempts=1), writer_stopped, quick=True),
)  # fmt: skip
