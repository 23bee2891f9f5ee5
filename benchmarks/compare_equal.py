"""`muster compare` on real runs: how often equal runs are called different, how often a slower side is found.

    A, B   a training of 2 ranks, the same on both sides     "slower" and "faster" are false
    +10    the same with 10 % more of what takes the time    "slower" is wanted

By default the ranks are two nodes of a box, and the time is that of gradients on its links: +10 has 10 % more
parameters. Shaped links take the same time in each run. With --cpu there is no box, and the time is that of the
model's forward: runs vary as much as the cores do.

Runs are real: each is a `muster run` with fresh processes. They come in blocks of one run of each, in turns (A B +10,
then +10 B A). A comparison takes the runs of `--repeats` blocks on each side. As 50 comparisons of new runs would take
hours, blocks are measured once and comparisons draw from them, so they are not independent of each other.

    one sweep     both sides of the same blocks, as points of one sweep with --repeat: drawn at random, 50 times
    two sweeps    the first side's blocks in a row, then as many others for the second: every place and pair there is

Two sweeps cannot tell a drift of the machine from a difference, so `compare` wants 5 % more of them. What +10 % really
was is measured: the median over blocks of +10 against A. How noisy the machine was decides what can be found: of made
runs that vary by 1, 2, 3 and 5 %, one sweep of 5 repeats finds 100, 99, 84 and 39 % (two sweeps: 99, 64, 31, 10 %).

    .venv/bin/python benchmarks/compare_equal.py [--cpu] [--blocks 16] [--minutes 9] [--keep DIR] [--json FILE]
    .venv/bin/python benchmarks/compare_equal.py --from DIR        judge runs that were kept
"""

import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from harness import Options, command, finish, table, verdict
from ranks import place

from muster.jobs.runfolder.rundir import RunDir
from muster.launch.look.comparison import compared
from muster.launch.look.steps import Measured, read_measured

if TYPE_CHECKING:
    from torch import nn

REPEATED = {"A": 100, "B": 100, "+10": 112}  # repeats of a layer; the optimizer and the ranks' sums take no longer
WIDTHS = {"A": 2000, "B": 2000, "+10": 2200}  # of the only layer of a size, whose gradients take the time
ARMS, NODES = list(WIDTHS), 2
FALSE_REACH, FOUND_REACH = 0.05, 0.90
WORDS = ("slower", "faster", "same", "no verdict")
DRAWS, STEPS = 50, 60
Block = dict[str, Measured]


def build(repeats: int) -> "nn.Module":
    """Make a model whose forward repeats a layer."""
    import torch
    from torch import nn

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer, self.head = nn.Linear(192, 128), nn.Linear(128, 128), nn.Linear(128, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            x = self.first(nn.functional.avg_pool2d(images, 4).flatten(1))
            for _ in range(repeats):
                x = torch.tanh(self.layer(x))
            return self.head(x)

    return Repeated()


def wide(width: int) -> "nn.Module":
    """Make a model whose gradients take longer than its forward and backward."""
    from torch import nn

    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, width), nn.Tanh(), nn.Linear(width, 10))


def measure(folder: Path, box: str, blocks: int, limit_s: float) -> None:
    """Train every arm of every block, as many blocks as the time allows; runs are named by arm and block."""
    started = time.monotonic()
    for number in range(blocks):
        spent_s = time.monotonic() - started
        if number and spent_s * (number + 1) / number > limit_s:
            print(f"{number} of {blocks} blocks took {spent_s:.0f} s: the time is over")
            break
        for arm in ARMS[:: 1 if number % 2 == 0 else -1]:
            train(folder / f"{number:03d}" / arm, box, arm)


def train(runs: Path, box: str, arm: str) -> None:
    """Make one run in a folder of its own, in a box if there is one."""
    runs.mkdir(parents=True)
    made, size = ("wide", {"width": WIDTHS[arm]}) if box else ("build", {"repeats": REPEATED[arm]})
    model = {"make": f"{Path(__file__).name}:{made}", "args": size}
    section = {"model": model, "data": "digits", "mode": "flat", "batch_size": 64, "steps": STEPS, "evaluate": False}
    ranks = {"nodes": NODES, "ranks_per_node": 1} if box else {"ranks_per_node": 2}
    job = {"name": "equal", "workdir": str(Path(__file__).parent), **ranks, "train": section}
    (runs / "job.yaml").write_text(yaml.safe_dump({**job, "train": {**section, "device": "cpu"}}))
    hosts = ["--hosts", f"box:{box}"] if box else []
    command([sys.executable, "-m", "muster", "run", str(runs / "job.yaml"), "--runs", str(runs), *hosts])


def blocks_of(folder: Path) -> list[Block]:
    """Read the blocks of which all runs are there."""
    found = []
    for block in sorted(folder.iterdir()):
        runs = {arm: [each for each in (block / arm).glob("equal-*") if each.is_dir()] for arm in ARMS}
        if all(runs.values()):
            found.append({arm: read_measured(RunDir(paths[0])) for arm, paths in runs.items()})
    return found


def one_sweep(blocks: Sequence[Block], repeats: int) -> Iterator[tuple[list[Block], list[Block]]]:
    """Draw the same blocks for both sides."""
    draw = random.Random(0)
    for _ in range(DRAWS):
        own = sorted(draw.sample(range(len(blocks)), repeats))
        yield [blocks[at] for at in own], [blocks[at] for at in own]


def two_sweeps(blocks: Sequence[Block], repeats: int) -> Iterator[tuple[list[Block], list[Block]]]:
    """Take blocks in a row for each side, one after the other."""
    for start in range(len(blocks) - 2 * repeats + 1):
        yield list(blocks[start : start + repeats]), list(blocks[start + repeats : start + 2 * repeats])


def answer(before: Sequence[Measured], after: Sequence[Measured]) -> str:
    """Return what `muster compare` says of the second side."""
    return compared({"before": before, "after": after}, "before")[1].verdict


def judged(blocks: Sequence[Block], repeats: int) -> list[dict[str, object]]:
    """Judge all comparisons; return a row for each kind of them."""
    pairs = {"equal": [("A", "B"), ("B", "A")], "+10": [("A", "+10"), ("B", "+10")]}
    rows, cells = [], []
    for how, drawn in (("one sweep", one_sweep), ("two sweeps", two_sweeps)):
        for kind, arms in pairs.items():
            answers = Counter(
                answer([block[one] for block in first], [block[other] for block in second])
                for number, (first, second) in enumerate(drawn(blocks, repeats))
                for one, other in (arms if how == "two sweeps" else [arms[number % 2]])
            )
            count = sum(answers.values())
            share = {word: answers[word] / count for word in WORDS}
            found = share["slower"] if kind == "+10" else share["slower"] + share["faster"]
            reach, sign = (FOUND_REACH, ">=") if kind == "+10" else (FALSE_REACH, "<=")
            reached = found >= reach if kind == "+10" else found <= reach
            beside = how == "two sweeps" and kind == "+10"
            name = f"{kind}, {how}"
            said = verdict(reached, None if beside else reach, sign)
            cells.append([name, str(count), *(f"{share[word]:.0%}" for word in WORDS), said])
            rows.append({"name": name, "reached": reached or beside, "share": found, "answers": answers})
    table(["comparisons", "n", *WORDS, "reach"], cells)
    return rows


def main() -> int:
    """Measure, compare, report."""
    parser = Options(__doc__, repeats=5, quick={"blocks": 10, "minutes": 3.0})
    parser.add_argument("--blocks", type=int, default=16, help="of a run of each arm")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no block that would end after this")
    parser.add_argument("--cpu", action="store_true", help="no box: the model's forward takes the time")
    parser.add_argument("--rate", default="200mbit", help="of the box's links")
    parser.add_argument("--keep", type=Path, help="a folder for the runs")
    parser.add_argument("--from", dest="kept", type=Path, help="judge a folder that was kept, measure nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = args.kept or args.keep or Path(folder)
        if args.kept is None:
            with nullcontext() if args.cpu else place(None, args.rate, NODES) as box:
                measure(root, box.name if box else "", args.blocks, 60 * args.minutes)
        blocks = blocks_of(root)
    if len(blocks) < 2 * args.repeats:
        raise SystemExit(f"{len(blocks)} blocks are there, {2 * args.repeats} are the least; give more --minutes")
    medians = {arm: [statistics.median(each.seconds for each in block[arm].steps) for block in blocks] for arm in ARMS}
    ratio = {arm: statistics.median(b / a for a, b in zip(medians["A"], medians[arm], strict=True)) for arm in ARMS}
    noise = {arm: statistics.stdev(values) / statistics.fmean(values) for arm, values in medians.items()}
    for arm, values in medians.items():
        step_ms = 1e3 * statistics.median(values)
        print(f"{arm}: {step_ms:.2f} ms a step, {ratio[arm]:.3f} of A; runs vary by {noise[arm]:.1%}")
    rows = judged(blocks, args.repeats)
    return finish(args, "compare_equal", rows, blocks=len(blocks), repeats=args.repeats, ratio=ratio, noise=noise)


if __name__ == "__main__":
    sys.exit(main())
