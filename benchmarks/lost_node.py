"""The power of one of four box nodes is cut: to the first new step on the other three.

    sudo .venv/bin/python benchmarks/lost_node.py [--box NAME] [--repeats 5] [--how power|unplug|freeze|kill]

The job runs over ssh with `min_nodes: 3`. What the time went to is read from attempts.jsonl. Recorded for comparison,
not measured here: torchrun needs 45.7 s, plain gloo 933 s, Slurm alone 300 s.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from faults.bench import Bench
from faults.live import muster
from faults.nodes import FOUR, NODE, box

REACH_S = 15.0
RECORDED_S = {"torchrun": 45.7, "gloo": 933.0, "slurm": 300.0}
PARTS = ("detect_s", "stop_s", "start_s", "load_s", "replay_s")


def once(bench: Bench, how: str) -> dict[str, float]:
    """Return the seconds to the first new step, and the parts of the time lost."""
    live = bench.start(FOUR, "--hosts", f"box:{bench.box}", "--on", "ssh")
    try:
        live.wait_step(24)
        began = time.time()
        box("fail", NODE, "--how", how, "--name", bench.box)
        first = live.wait_event("first_step", attempt=1)
        code = live.end()
        assert code == 0, live.last_words()
        old, new = live.attempts()
        assert new["world_size"] == 3, new
        times = old["times"] | new["times"]
        return {"seconds": first["time"] - began, **{part: times.get(part, 0.0) for part in PARTS}}
    finally:
        live.kill()
        muster("box", "heal", NODE, "--name", bench.box)


def main() -> int:
    """Measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--box", default="box", help="the name of a box that is up")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--how", choices=["power", "unplug", "freeze", "kill"], default="power")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        bench = Bench(Path(text), box=args.box)
        rows = [once(bench, args.how) for _ in range(args.repeats)]
    seconds = [row["seconds"] for row in rows]
    median, slowest = statistics.median(seconds), max(seconds)
    parts = ", ".join(f"{part.removesuffix('_s')} {statistics.median(row[part] for row in rows):.2f}" for part in PARTS)
    print(f"first new step on three nodes after {median:.2f} s (median; {parts}), {slowest:.2f} s (slowest)")
    print(f"reach {REACH_S:g} s; recorded elsewhere: {', '.join(f'{name} {s:g} s' for name, s in RECORDED_S.items())}")
    print(json.dumps({"benchmark": "lost node", "how": args.how, "rows": rows, "reach": REACH_S, **RECORDED_S}))
    return 0 if slowest <= REACH_S else 1


if __name__ == "__main__":
    sys.exit(main())
