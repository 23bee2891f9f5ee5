"""Faults of processes: killed, stopped, stuck, out of step (rows 1 to 4, 8, 9 and 14 of the matrix)."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from faults.bench import Bench, killed_then_resumed
from faults.live import Live, read_rank_lines, signal_all
from faults.table import Expected, Fault, Outcome
from faults.work import job

HANG_S = 3.0
HUNG = job(hang_s=HANG_S)
PLAIN = job()


def kill(whom: Callable[[Live], Sequence[int]]) -> Callable[[Bench], Outcome]:
    """Return a row's run: kill -9 of some processes at step 24."""
    return lambda bench: bench.hurt(PLAIN, lambda live: _signal(whom(live), signal.SIGKILL))


def freeze(whom: Callable[[Live], Sequence[int]], text: str = HUNG) -> Callable[[Bench], Outcome]:
    """Return a row's run: kill -STOP of some processes at step 24."""
    return lambda bench: bench.hurt(text, lambda live: _signal(whom(live), signal.SIGSTOP))


def bent(what: str, *, names: str = "") -> Callable[[Bench], Outcome]:
    """Return a row's run: rank 1 does `what` at loop index 24 of attempt 0; `names`: what must stand in the events."""

    def run(bench: Bench) -> Outcome:
        def bent_at(live: Live) -> float:
            live.wait_event("attempt_ended", attempt=0, deadline_s=60.0)
            return min(read_rank_lines(live, "bent: "), default=time.time())

        return bench.hurt(HUNG, bent_at, ready=lambda live: live.wait_step(20), bend=f"{what}:1:24:0")

    return run


def supervisor_killed(bench: Bench) -> Outcome:
    """Kill the supervisor; when all is gone, `muster resume`."""
    act, then = killed_then_resumed()
    return bench.hurt(PLAIN, act, then=then)


def supervisor_killed_resumed_at_once(bench: Bench) -> Outcome:
    """Kill the supervisor and resume without waiting for its ranks to go: never two attempts at a time."""

    def act(live: Live) -> float:
        began = time.time()
        live.process.kill()
        return began

    _, then = killed_then_resumed()
    return bench.hurt(PLAIN, act, then=then)


def writer_stopped(bench: Bench) -> Outcome:
    """Stop the helpers that write checkpoints for two seconds: training goes on, saves are left out."""
    seen: list[int] = []

    def act(live: Live) -> float:
        began = time.time()
        helpers = [helper for pid in live.ranks().values() for helper in live.writers(pid)]
        signal_all(helpers, signal.SIGSTOP)
        first = live.steps()
        time.sleep(2.0)
        seen.append(live.steps() - first)
        signal_all(helpers, signal.SIGCONT)
        return began

    outcome = bench.hurt(job(steps=300), act, reference=job(steps=300))
    return _with_steps_meanwhile(outcome, seen[0])


def _with_steps_meanwhile(outcome: Outcome, steps: int) -> Outcome:
    from dataclasses import replace

    wrong = outcome.wrong if steps > 10 else (*outcome.wrong, f"only {steps} steps while the helpers stood")
    return replace(outcome, wrong=wrong, notes=(*outcome.notes, f"{steps} steps while the helpers stood"))


def _signal(pids: Sequence[int], number: signal.Signals) -> float:
    began = time.time()
    signal_all(pids, number)
    return began


KILLED = Expected(attempts=2, detect_s=0.5, resume_s=5.0, lost_steps=20)
# A run that lost an agent has a third attempt if it grows back before its end.
LOST = replace(KILLED, attempts=None)
HANGS = Expected(attempts=2, detect_s=HANG_S + 2.0, resume_s=HANG_S + 7.0, lost_steps=20)

FAULTS = (
    Fault(1, "rank killed in a collective", "kill -9 rank 1", KILLED, kill(lambda live: [live.ranks()[1]]), quick=True),
    Fault(2, "rank 0 killed", "kill -9 rank 0", KILLED, kill(lambda live: [live.ranks()[0]]), quick=True),
    Fault(3, "rank stopped", "kill -STOP rank 1", HANGS, freeze(lambda live: [live.ranks()[1]]), quick=True),
    Fault(3, "rank holds the interpreter's lock", "sleep in C with the GIL", HANGS, bent("gil")),
    Fault(4, "rank never enters a collective", "rank 1 sleeps instead", HANGS, bent("absent"), quick=True),
    Fault(4, "rank skips one reduction and goes on", "rank 1 leaves it out", HANGS, bent("skip")),
    Fault(8, "agent killed", "kill -9 agent of node 1", LOST, kill(lambda live: live.agents()[1:2]), quick=True),
    Fault(8, "agent of node 0 killed", "kill -9 agent of node 0", LOST, kill(lambda live: live.agents()[:1])),
    Fault(8, "keeper killed", "kill -9 keeper of node 1", KILLED, kill(lambda live: live.keepers()[1:2])),
    Fault(8, "agent frozen", "kill -STOP agent of node 1", Expected(detect_s=6.5, resume_s=20.0),
          freeze(lambda live: live.agents()[1:2], job(steps=600))),
    Fault(8, "supervisor killed", "kill -9, muster resume", Expected(attempts=2, lost_steps=None), supervisor_killed,
          quick=True),
    Fault(8, "supervisor killed, resumed at once", "kill -9, muster resume", Expected(attempts=2),
          supervisor_killed_resumed_at_once),
    Fault(9, "store killed", "kill -9 store", Expected(), kill(lambda live: [live.store()])),
    Fault(9, "store frozen", "kill -STOP store", Expected(), freeze(lambda live: [live.store()])),
    Fault(14, "checkpoint writer stopped 2 s", "kill -STOP helpers", Expected(attempts=1), writer_stopped, quick=True),
)  # fmt: skip
