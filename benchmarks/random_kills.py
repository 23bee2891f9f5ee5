"""Random kills of ranks, nodes and supervisors, among 1, 2 and 4 ranks: the same weights as without any.

    .venv/bin/python benchmarks/random_kills.py [--kills 20] [--seed 0] [--json FILE]

A training with `exact: true` runs on one machine. Again and again, after a random number of steps, somebody is killed
with -9: a rank, a whole pretend node (its agent), or the supervisor, after which `muster resume` goes on with another
number of ranks. The last checkpoint's tensors, parameters and optimizer state, must have the sha256 that an
uninterrupted run's have.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from faults.bench import Bench
from faults.live import Live, WaitedInVainError, resume, start
from faults.state import digest, last_step, tensors
from faults.work import job

KINDS = ("rank", "node", "supervisor")
STEPS_APART = (5, 25)
SIZES = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4))  # nodes, ranks on each
EVERY = 7


def story(kills: int, seed: int) -> tuple[str, list[str]]:
    """Return the job, long enough for so many kills, and whom to kill, in order."""
    draw = random.Random(seed)
    # Each kind as often as the others; a supervisor's end is also how the number of ranks changes.
    kinds = [KINDS[number % len(KINDS)] for number in range(kills)]
    draw.shuffle(kinds)
    text = job(
        nodes=2, ranks=1, steps=STEPS_APART[1] * (kills + 6), every=EVERY, restart={"max": kills + 5, "backoff": 0.0}
    )
    return text, kinds


class Torment:
    """One run, killed and continued until nobody is left to kill; `meanwhile` is called while it has no supervisor."""

    def __init__(self, live: Live, seed: int, meanwhile: Callable[[Live], object]) -> None:
        self.live = live
        self.meanwhile = meanwhile
        self.draw = random.Random(seed + 1)
        self.rows: list[dict[str, Any]] = []

    def strike(self, kind: str) -> None:
        """Wait for some new steps of the newest attempt, kill, and wait until it goes on."""
        live = self.live
        live.wait_event("attempt")
        attempt = live.run.attempt_numbers()[-1]
        begun = int(live.wait_event("first_step", attempt=attempt)["step"])
        live.wait_step(begun + self.draw.randint(*STEPS_APART), attempt)
        ranks = live.ranks(attempt)
        row: dict[str, Any] = {"kind": kind, "attempt": attempt, "step": live.steps(), "ranks": len(ranks)}
        began = time.monotonic()
        if kind == "supervisor":
            live.wait_committed(2)  # so that one can be hurt meanwhile
            live.kill()
            self.meanwhile(live)
            nodes, each = self.draw.choice([size for size in SIZES if size[0] * size[1] != len(ranks)])
            self.live = live = resume(live, "--nodes", str(nodes), "--ranks-per-node", str(each))
            row["from"] = live.wait_event("resuming", attempt=live.first_attempt)["checkpoint"]
        else:
            victims = list(ranks.values()) if kind == "rank" else live.agents()
            os.kill(self.draw.choice(victims), signal.SIGKILL)
        live.wait_event("first_step", attempt=attempt + 1)
        self.rows.append(row | {"resumed_s": round(time.monotonic() - began, 2)})
        print(
            f"{len(self.rows):>3}  {kind:<10} of {len(ranks)} ranks at step {row['step']:>4}, "
            f"new step after {self.rows[-1]['resumed_s']:.2f} s",
            flush=True,
        )


def torment(
    folder: Path, kills: int, seed: int, meanwhile: Callable[[Live], object] = lambda live: None
) -> dict[str, Any]:
    """Run the job with and without kills, both at once; return what came of both.

    Raises:
        WaitedInVainError: the run did not go on.
    """
    text, kinds = story(kills, seed)
    with ThreadPoolExecutor(1) as beside:
        unhurt = beside.submit(Bench(folder).reference, text)
        hurt = Torment(start(folder / "hurt", text), seed, meanwhile)
        try:
            hurt.live.wait_committed(1)  # a run that has saved nothing has nothing to be resumed from
            for kind in kinds:
                hurt.strike(kind)
            code = hurt.live.end(600.0)
            if code != 0:
                raise WaitedInVainError(f"the run ended with {code}: {hurt.live.last_words()}")
            return facts(hurt, kinds) | {"wanted": digest(unhurt.result())}
        finally:
            hurt.live.kill()


def facts(hurt: Torment, kinds: list[str]) -> dict[str, Any]:
    """Return what is known of a run that has ended."""
    run = hurt.live.run
    sizes = Counter(row["world_size"] for row in hurt.live.events("attempt"))
    return {
        "kills": dict(Counter(kinds)),
        "attempts": len(run.attempt_numbers()),
        "attempts_by_ranks": {str(size): count for size, count in sorted(sizes.items())},
        "steps": last_step(run),
        "sha256": digest(tensors(run)),
        "rows": hurt.rows,
    }


def main() -> int:
    """Torment, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        found = torment(Path(text), args.kills, args.seed)
    equal = found["sha256"] == found["wanted"]
    kills = ", ".join(f"{count} of a {kind}" for kind, count in found["kills"].items())
    print(f"{args.kills} kills ({kills}), {found['attempts']} attempts, on ranks: {found['attempts_by_ranks']}")
    print(f"sha256 {found['sha256']}\nwanted {found['wanted']}: {'equal' if equal else 'NOT EQUAL'}")
    record = {"benchmark": "random kills", "seed": args.seed, "equal": equal, **found}
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({key: value for key, value in record.items() if key != "rows"}))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
