"""Slow nodes and slow pairs, as `muster bench --pairs` names them in a box of four nodes at 1 Gbit/s.

Every one is to be named, and nobody else.

    node      a node's link at 750 Mbit/s, at both ends           10 cases, every node in turn
    pair      750 Mbit/s between two nodes, in both directions    10 cases, every pair in turn
    healthy   nothing is slow                                      4 cases: nobody may be named

One box for all cases, shaped anew for each; the cases come in a shuffled order. What is measured is what a user has:
the command, over ssh, with its records read back.

    sudo .venv/bin/python benchmarks/slow_links.py [--quick] [--rate 1gbit] [--share 0.75] [--launches 3] [--seed 0]
"""

import itertools
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from harness import Options, finish
from ranks import place

from muster.cloudlab.box.control import Box
from muster.cloudlab.box.spec import parse_rate, rate_text
from muster.collectives_bench.results.files import read_result
from muster.collectives_bench.results.slow import Findings, slow

NODES = 4
LIMIT_S = 120


@dataclass(frozen=True)
class Case:
    """What is made slow, and so what must be named: one node, two, or nobody."""

    kind: str
    nodes: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """Say what is slow."""
        return " ".join([self.kind, *map(str, self.nodes)])


def cases_of(count: int, healthy: int, seed: int) -> list[Case]:
    """Return `count` slow nodes, as many slow pairs, and some healthy boxes, in a shuffled order."""
    pairs = itertools.cycle(itertools.combinations(range(NODES), 2))
    nodes = itertools.cycle(range(NODES))
    found = [Case("node", (node,)) for node in itertools.islice(nodes, count)]
    found += [Case("pair", pair) for pair in itertools.islice(pairs, count)]
    found += [Case("healthy")] * healthy
    random.Random(seed).shuffle(found)
    return found


def shape(box: Box, case: Case, rates: tuple[int, int]) -> None:
    """Make links as a case has them; `rates` are the healthy one and the slow one."""
    healthy, slow_rate = rates
    box.rate(healthy)
    names = [f"node{node}" for node in case.nodes]
    if case.kind == "node":
        box.rate(slow_rate, of=names[0])
    elif case.kind == "pair":
        box.rate(slow_rate, (names[0], names[1]))


def measure(box: Box, launches: int, seed: int, folder: Path) -> Findings:
    """Run the command in a box and judge its pairs."""
    before = set(folder.iterdir()) if folder.is_dir() else set()
    argv = [sys.executable, "-m", "muster", "bench", "--pairs", "--hosts", f"box:{box.name}", "-N", str(NODES)]
    argv += ["--launches", str(launches), "--seed", str(seed), "--runs", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    runs = set(folder.iterdir()) - before if folder.is_dir() else set()
    pairs = [pair for run in runs for pair in read_result([run]).pairs]
    if len(pairs) != launches * NODES * (NODES - 1) // 2:
        raise SystemExit(f"muster bench ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return slow(pairs)


def is_right(case: Case, found: Findings) -> tuple[bool, int]:
    """Say whether a case's culprit was named, and how many others were."""
    kind = {"node": "node", "pair": "link", "healthy": ""}[case.kind]
    right = [each for each in found.slow if (each.kind, each.nodes) == (kind, case.nodes)]
    return bool(right) or not kind, len(found.slow) - len(right)


def main() -> int:
    """Try every case; print what was named."""
    parser = Options(__doc__, quick={}, note="four cases: two slow nodes, a slow pair, a healthy box")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--share", type=float, default=0.75, help="what a slow link has of the rate")
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rate = parse_rate(args.rate)
    if rate is None:
        parser.error("--rate none: nothing would be slower")
    slow_rate = round(rate * args.share)
    cases = cases_of(10, 4, args.seed)
    if args.quick:
        cases = [Case("node", (0,)), Case("pair", (1, 3)), Case("healthy"), Case("node", (2,))]
    rows = []
    with place(None, args.rate, NODES) as box, tempfile.TemporaryDirectory(prefix="slow-links-") as folder:
        for number, case in enumerate(cases):
            started = time.monotonic()
            shape(box, case, (rate, slow_rate))
            found = measure(box, args.launches, args.seed + number, Path(folder) / "runs")
            right, others = is_right(case, found)
            seconds = time.monotonic() - started
            word = "right" if right and not others else "WRONG"
            print(f"{case.text:<10} {word}  noise ±{found.noise:.1%}  {seconds:.1f} s  {'; '.join(found.lines())}")
            named = [[each.kind, list(each.nodes), each.direction, round(each.ratio, 4)] for each in found.slow]
            judged = {"reached": right and not others, "right": right, "others": others}
            rows.append({"name": case.text, **judged, "noise": found.noise, "named": named})
    ill = [row for row in rows if row["name"] != "healthy"]
    named_right, false = sum(row["right"] for row in ill), sum(row["others"] for row in rows)
    print(f"{named_right} of {len(ill)} slow nodes and pairs named, {false} false names, {len(rows)} cases")
    settings = {"rate": args.rate, "slow": rate_text(slow_rate), "launches": args.launches}
    return finish(args, "slow links", rows, named=named_right, of=len(ill), false=false, **settings)


if __name__ == "__main__":
    sys.exit(main())
