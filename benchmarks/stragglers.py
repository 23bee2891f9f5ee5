"""Is a slow rank named, and no other? Trainings on four nodes of a box, with one rank slowed and without.

A slowed rank takes 1.3 times as long for its forward and backward, whose time is made (slow_model.py). Every case
trains for a while after its first step; then `muster status --json` tells which ranks are slow. Cases differ in the
mode, the rank and the shards (a batch of 62 gives two ranks a sample more). A slow and a healthy run share the box.

    named      the slow rank was named, and no other rank (of 20 cases, 19 at least)
    healthy    of equal ranks none was named at any time (of 20 cases, all)

sudo .venv/bin/python benchmarks/stragglers.py [--box NAME] [--cases 0-9] [--seconds 16] [--json FILE]
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from faults.bench import in_box
from faults.live import Live, start
from harness import Options, finish, table

NODES = 4
FACTOR = 1.3
LEAST_NAMED = 19 / 20
VARIANTS: tuple[Mapping[str, Any], ...] = (
    {"mode": "bucketed", "batch_size": 64},
    {"mode": "ddp", "batch_size": 64},
    {"mode": "zero2", "batch_size": 64},
    {"mode": "allreduce", "batch_size": 62},
    {"mode": "bucketed", "batch_size": 62},
)
CASES = 20


def job(number: int, *, slow: bool) -> str:
    """Return the job of a case: JSON is YAML."""
    rank = number * 7 % NODES if slow else -1
    model = {"make": str(Path(__file__).with_name("slow_model.py")) + ":build"}
    train = {
        **VARIANTS[number % len(VARIANTS)],
        "model": {**model, "args": {"slow": rank, "factor": FACTOR}},
        "data": "digits",
        "steps": 1_000_000,
        "log_every": 20,
        "evaluate": False,
        "optimizer": {"name": "sgd", "lr": 0.001},
    }
    return json.dumps({"name": "case", "nodes": NODES, "threads_per_rank": 1, "train": train})


def named(live: Live) -> list[dict[str, Any]]:
    """Return the stragglers of a run, as status shows them."""
    argv = [sys.executable, "-m", "muster", "status", live.run.run_id, "--runs", str(live.root), "--json"]
    shown = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    found: list[dict[str, Any]] = shown["stragglers"]
    return found


def measure(folder: Path, box: str, number: int, seconds: float, slow: bool) -> dict[str, Any]:
    """Run one case."""
    place = folder / f"{number}-{slow}"
    place.mkdir()
    live = start(place, job(number, slow=slow), *in_box(box))
    try:
        first = live.wait_event("first_step")["time"]
        live.wait("the time to pass", lambda: time.time() - first >= seconds)
        found, told = named(live), live.events("slow")
        steps = max(1, sum(1 for _ in live.run.metrics.open()))
        live.process.send_signal(signal.SIGINT)
        live.end(30.0)
    finally:
        live.kill()
    ranks = [each["ranks"] for each in found]
    ever = sorted({rank for row in told for each in row["stragglers"] for rank in each["ranks"]})
    right = [[number * 7 % NODES]] if slow else []
    row = {
        "name": f"{'slow' if slow else 'healthy'} {number}",
        "mode": "{mode}, batch {batch_size}".format(**VARIANTS[number % len(VARIANTS)]),
        "slow": slow,
        "ranks": ranks,
        "right": right,
        "false": sorted(set(ever) - {rank for each in right for rank in each}),
        "ratio": [each["own_s"] / each["usual_s"] for each in found],
        "after_s": told[0]["time"] - first if told else None,
        "steps": steps,
    }
    return row | {"reached": ranks == right and not row["false"]}


def main() -> int:
    """Run the cases, each slow one beside its healthy one."""
    parser = Options(__doc__, quick={"cases": "0-1"})
    parser.add_argument("--box", default="box", help="the name of a box that is up")
    parser.add_argument("--cases", default=f"0-{CASES - 1}")
    parser.add_argument("--seconds", type=float, default=16.0)
    args = parser.parse_args()
    first, _, last = args.cases.partition("-")
    rows = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        for number in range(int(first), int(last or first) + 1):
            found = pool.map(partial(measure, Path(folder), args.box, number, args.seconds), (True, False))
            for row in found:
                rows.append(row)
                print(json.dumps(row), flush=True)
    head = ("case", "mode", "slow", "named", "ratio", "after s", "steps", "right")
    cells = []
    for row in rows:
        ratios, after = " ".join(f"{each:.2f}" for each in row["ratio"]), f"{row['after_s'] or 0:.1f}"
        ranks, steps, right = (str(row[name]) for name in ("ranks", "steps", "reached"))
        cells.append((row["name"], row["mode"], str(row["right"]), ranks, ratios, after, steps, right))
    table(head, cells)
    slow_rows, healthy = [[row for row in rows if row["slow"] is which] for which in (True, False)]
    right = sum(row["reached"] for row in slow_rows)
    falsely = sum(bool(row["false"]) for row in rows)
    print(f"named {right} of {len(slow_rows)}; falsely named in {falsely} of {len(rows)} runs ({len(healthy)} healthy)")
    claims = [
        {"name": "named", "reached": right >= LEAST_NAMED * len(slow_rows), "right": right, "of": len(slow_rows)},
        {"name": "falsely named", "reached": not falsely, "runs": falsely, "of": len(rows)},
    ]
    return finish(args, "stragglers", claims, cases=rows)


if __name__ == "__main__":
    sys.exit(main())
