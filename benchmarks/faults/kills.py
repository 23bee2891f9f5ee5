"""Random kills of ranks, nodes and supervisors, among 1, 2 and 4 ranks: the same weights as without any.

A training with `exact: true` runs on one machine. Again and again, after a random number of steps, somebody is killed
with -9: a rank, a whole pretend node (its agent), or the supervisor, after which `muster resume` goes on with another
number of ranks.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from faults.bench import Bench, judged
from faults.live import Live, resume
from faults.state import digest
from faults.table import Expected, Fault, Outcome
from faults.work import job

KINDS = ("rank", "node", "supervisor")
STEPS_APART = (5, 25)
SIZES = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4))  # nodes, ranks on each
NODES = 2  # at first, with one rank on each
EVERY = 7
LIMIT_S = 600.0


def story(kills: int, seed: int) -> tuple[str, list[str]]:
    """Return the job, long enough for so many kills, and whom to kill, in order."""
    draw = random.Random(seed)
    # Each kind as often as the others; a supervisor's end is also how the number of ranks changes.
    kinds = [KINDS[number % len(KINDS)] for number in range(kills)]
    draw.shuffle(kinds)
    steps, restart = STEPS_APART[1] * (kills + 6), {"max": kills + 5, "backoff": 0.0}
    return job(nodes=NODES, steps=steps, every=EVERY, restart=restart), kinds


def slow_while_few(bench: Bench, ranks: int) -> str:
    """Return a bend that slows down survivors in place, or the run would end before the missing ranks are back."""
    return f"few:all:{ranks}:all" if bench.in_place else ""


def trained(live: Live, ranks: int, steps: int) -> dict[str, Any] | None:
    """Return the newest attempt's event once `ranks` ranks have trained `steps` steps in it.

    After a node is killed, the run continues with fewer ranks until that node returns.
    """
    begun = live.attempt()
    if begun["world_size"] != ranks:
        return None
    attempt = begun["attempt"]
    first = live.events("first_step", attempt=attempt)
    return begun if first and live.steps(attempt) >= first[0]["step"] + steps else None


def strike(
    bench: Bench, live: Live, kind: str, draw: random.Random, meanwhile: Callable[[Live], object]
) -> tuple[Live, dict[str, Any]]:
    """Wait for some new steps of all ranks, kill, and wait until the run goes on; return what goes on."""
    steps = draw.randint(*STEPS_APART)
    all_ranks = live.wait_event("attempt", attempt=live.first_attempt)["world_size"]
    attempt = live.wait(f"{steps} steps of {all_ranks} ranks", lambda: trained(live, all_ranks, steps))["attempt"]
    ranks = live.ranks(attempt)
    row: dict[str, Any] = {"kind": kind, "attempt": attempt, "step": live.steps(), "ranks": len(ranks)}
    began = time.monotonic()
    if kind == "supervisor":
        live.wait_committed(2)  # so that one can be hurt meanwhile
        live.kill()
        meanwhile(live)
        nodes, each = draw.choice([size for size in SIZES if size[0] * size[1] != len(ranks)])
        bend = slow_while_few(bench, nodes * each)
        live = resume(live, "--nodes", str(nodes), "--ranks-per-node", str(each), bend=bend)
        row["from"] = live.wait_event("resuming", attempt=live.first_attempt)["checkpoint"]
    else:
        os.kill(draw.choice(list(ranks.values()) if kind == "rank" else live.agents()), signal.SIGKILL)
    live.wait_later("first_step", attempt + 1)
    seconds = time.monotonic() - began
    live.notes.append(f"{kind} of {len(ranks)} ranks at step {row['step']}, new step after {seconds:.2f} s")
    return live, row | {"resumed_s": round(seconds, 2)}


def torment(
    bench: Bench, kills: int, seed: int, meanwhile: Callable[[Live], object] = lambda live: None
) -> tuple[Outcome, list[dict[str, Any]]]:
    """Run the job with and without kills, both at once; return what came of it and a row for each kill.

    `meanwhile` is called while the run has no supervisor.
    """
    (text, kinds), draw, rows = story(kills, seed), random.Random(seed + 1), []
    live = bench.start(text, bend=slow_while_few(bench, NODES))
    with ThreadPoolExecutor(1) as beside:
        unhurt = beside.submit(bench.reference, text)
        try:
            live.wait_committed(1)  # a run that has saved nothing has nothing to be resumed from
            for kind in kinds:
                live, row = strike(bench, live, kind, draw, meanwhile)
                rows.append(row)
            code, wanted = live.end(LIMIT_S), unhurt.result()
            sizes = Counter(row["world_size"] for row in live.events("attempt"))
            killed = ", ".join(f"{count} of a {kind}" for kind, count in Counter(kinds).items())
            live.notes.append(f"{kills} kills ({killed}); attempts by ranks {dict(sorted(sizes.items()))}")
            live.notes.append(f"sha256 wanted {digest(wanted)}")
            verdict = live.events("ended")[-1]["class"]
            attempts = len(live.run.attempt_numbers())
            return Outcome(code=code, verdict=verdict, attempts=attempts, **judged(live, wanted)), rows
        finally:
            live.kill()
            bench.remove(live)


FAULTS = (
    Fault(8, "random kills", "kill -9 rank, agent or supervisor, again and again", Expected(),
          lambda bench: torment(bench, bench.kills, bench.seed)[0]),
)  # fmt: skip
