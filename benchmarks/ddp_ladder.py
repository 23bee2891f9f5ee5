"""The ladder in a box of four nodes: exposed communication of VGG-11 steps in each mode, predicted from a profile and
measured.

    profile    `muster run` of a bench: job in the box: all_reduce and gather_scatter at sizes around those of VGG-11's
               gradients, half of its launches before the training and half after
    measured   `muster run` of the same job in each mode; a step's exposed communication is what its slowest rank
               waited: the least of the ranks' `communication_s`, for the others' hold their wait for that rank too
    backward   of the predictions in which something hides behind it: that of the allreduce run, in which nothing is
               sent beside it

Four ranks share this machine's cores, so the batch is as small as it can be (a sample a rank): what ranks take from one
another is not predicted, and communication dominates. Closed form of the first rung, as a check: rank 0's link carries
(n - 1) S each way, a ring's 2 (n - 1) / n S, so gather_scatter takes n times as long as allreduce.

    sudo .venv/bin/python benchmarks/ddp_ladder.py [--rates 1gbit] [--modes allreduce,ddp] [--steps 8] [--quick]

Reach: every mode at every rate within 10 %; gather_scatter / allreduce 4.0 +- 10 %. About 4 minutes at 1 Gbit/s, 10
more with 100mbit; `--quick` takes fewer launches and steps, 2 minutes.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Options, finish, table
from ranks import place

from muster.cloudlab.box.spec import parse_rate
from muster.collectives_bench.cost.exposed import Compute
from muster.collectives_bench.cost.fit import fit
from muster.collectives_bench.cost.load import RankLoad, Recipe
from muster.collectives_bench.cost.modes import ways
from muster.collectives_bench.cost.profile import Profile
from muster.collectives_bench.cost.steps import predict
from muster.collectives_bench.results.files import read_result
from muster.jobs.basics.files import read_lines
from muster.jobs.models.anatomy import anatomy
from muster.jobs.models.shapes import VGG_SHAPES
from muster.jobs.runfolder.rundir import RunDir, list_runs

REACH = 0.10
NODES, BATCH, ITEMSIZE = 4, 4, 4
SKIPPED = 2  # steps: the first calls, and torch's new deal of buckets after the first
MODES = ("gather_scatter", "allreduce", "flat", "overlap", "bucketed", "ddp")
SIZES = (256, 2048, 20480, 65536, 294912, 1179648, 2359296, 4718592, 9437184)
BUCKETS = (18 * 2**20, 27 * 10**6, 37 * 10**6)
SLOWEST_CALL_S = 2.5  # larger sizes are extrapolated
LIMIT_S = 900
TRAIN = {
    "model": "vgg11",
    "data": "digits",
    "batch_size": BATCH,
    "log_every": 1000,
    "evaluate": False,
    "optimizer": {"name": "sgd", "lr": 1e-3},
}


@dataclass(frozen=True)
class Bench:
    """Where jobs run: a box, and the folder of their runs."""

    box: str
    folder: Path

    def run(self, name: str, section: dict[str, Any]) -> RunDir:
        """Run a job on the four nodes; return its folder."""
        job = self.folder / f"{name}.yaml"
        job.write_text(json.dumps({"name": name, "nodes": NODES, "ranks_per_node": 1, **section}))
        runs = self.folder / name
        argv = [sys.executable, "-m", "muster", "run", str(job), "--hosts", f"box:{self.box}", "--runs", str(runs)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return list_runs(runs)[0]


def bench_jobs(bits_s: float, launches: int) -> dict[str, dict[str, Any]]:
    """Return the jobs that measure what the predictions need, as far as a call is short enough."""
    shape = {"launches": launches, "least_samples": 3, "block_s": 0.5, "timeout_s": 120.0, "check": False}
    jobs = {}
    for operation, link, most in (
        ("all_reduce", 2 * (NODES - 1) / NODES, (*SIZES, *BUCKETS)),
        ("gather_scatter", 2 * (NODES - 1), (*SIZES, BUCKETS[1])),
    ):
        sizes = [size for size in most if link * size * 8 / bits_s <= SLOWEST_CALL_S]
        jobs[operation] = {"bench": {"operation": operation, "sizes": sizes, **shape}}
    return jobs


def measured(run: RunDir) -> dict[str, list[float]]:
    """Return seconds by phase, of each step that counts: the slowest rank's computing, the least rank's waiting."""
    attempt = run.attempt(0)
    ranks = [[row for row in read_lines(attempt.metrics(rank)) if "step_s" in row] for rank in range(NODES)]
    steps = list(zip(*ranks, strict=True))[SKIPPED:]
    return {
        "exposed": [min(row["communication_s"] for row in step) for step in steps],
        "rank 0": [step[0]["communication_s"] for step in steps],
        "forward": [max(row["forward_s"] for row in step) for step in steps],
        "backward": [max(row["backward_s"] for row in step) for step in steps],
    }


def predicted(profile: Profile, compute: Compute, modes: Sequence[str] = MODES) -> dict[str, float]:
    """Return the exposed communication of each mode."""
    load = RankLoad(anatomy(VGG_SHAPES["vgg11"]), Recipe(ITEMSIZE, ITEMSIZE, 0), NODES, BATCH, 1, ITEMSIZE)
    rows = predict(ways(modes), load, compute, profile, NODES)
    return {row.way.name: row.exposed.seconds for row in rows if row.exposed is not None}


def at_rate(rate: str, modes: Sequence[str], args: Any) -> list[dict[str, Any]]:
    """Measure and predict at one speed of the links."""
    bits_s = parse_rate(rate)
    assert bits_s is not None
    runs: dict[str, RunDir] = {}
    results: list[Path] = []
    with tempfile.TemporaryDirectory() as temporary, place(None, rate, NODES) as box:
        folder = Path(temporary) if args.keep is None else args.keep / rate
        folder.mkdir(parents=True, exist_ok=args.keep is None)
        bench = Bench(box.name, folder)  # type: ignore[union-attr]
        for when in ("before", "after"):
            for operation, job in bench_jobs(bits_s, args.launches).items():
                results.append(bench.run(f"{operation}-{when}".replace("_", "-"), job).path)
            for mode in modes if when == "before" else ():
                train = {**TRAIN, "mode": mode, "steps": args.steps + SKIPPED}
                runs[mode] = bench.run(mode.replace("_", "-"), {"train": train})
        profile = fit(read_result(results), name=f"box at {rate}")
        steps = {mode: measured(run) for mode, run in runs.items()}
    alone = steps["allreduce"]
    compute = Compute(statistics.median(alone["forward"]), statistics.median(alone["backward"]))
    told = predicted(profile, compute, modes)
    return [row_of(rate, bits_s, mode, times, told[mode]) for mode, times in steps.items()]


def row_of(rate: str, bits_s: float, mode: str, times: Mapping[str, list[float]], told_s: float) -> dict[str, Any]:
    """Compare a mode's exposed communication with the prediction, beside what its links alone would take."""
    nbytes = VGG_SHAPES["vgg11"].parameter_count() * ITEMSIZE
    link = 2 * (NODES - 1.0) if mode == "gather_scatter" else 2 * (NODES - 1) / NODES
    middle = {name: statistics.median(each) for name, each in times.items()}
    row = {"rate": rate, "mode": mode, "measured_s": middle["exposed"], "predicted_s": told_s}
    row |= {"error": told_s / middle["exposed"] - 1, "rank_0_s": middle["rank 0"], "backward_s": middle["backward"]}
    row |= {"bound_s": link * nbytes * 8 / bits_s, "steps": times["exposed"]}
    return {**row, "reached": abs(told_s / middle["exposed"] - 1) <= REACH}


def star_over_ring(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return gather_scatter / allreduce at each rate that has both: the number of nodes, say the links."""
    took = {(row["rate"], row["mode"]): row["measured_s"] for row in rows}
    stars = {rate: seconds for (rate, mode), seconds in took.items() if mode == "gather_scatter"}
    found = {rate: seconds / took[rate, "allreduce"] for rate, seconds in stars.items()}
    return [{"rate": rate, "star": star, "reached": abs(star / NODES - 1) <= REACH} for rate, star in found.items()]


def line_of(row: dict[str, Any]) -> list[str]:
    """Write a row of the table."""
    seconds = [f"{row[key]:.3f} s" for key in ("bound_s", "predicted_s", "measured_s")]
    more = [f"{row[key]:.3f} s" for key in ("rank_0_s", "backward_s")]
    spread = f"{min(row['steps']):.3f} .. {max(row['steps']):.3f} s"
    return [row["rate"], row["mode"], *seconds, f"{100 * row['error']:+.1f}%", spread, *more]


def main() -> int:
    """Measure, compare, report."""
    parser = Options(__doc__, quick={"steps": 4, "launches": 1})
    parser.add_argument("--rates", default="1gbit")
    parser.add_argument("--modes", default=",".join(MODES), help="allreduce is measured in any case")
    parser.add_argument("--steps", type=int, default=8, help="that count, in each mode")
    parser.add_argument("--launches", type=int, default=2, help="of the bench, before and again after")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="a new folder for the runs, to look at")
    args = parser.parse_args()
    modes = [mode for mode in MODES if mode in (*args.modes.split(","), "allreduce")]
    rows = [row for rate in args.rates.split(",") for row in at_rate(rate, modes, args)]
    head = ["rate", "mode", "links alone", "predicted", "measured", "error", "steps", "rank 0", "backward"]
    table(head, map(line_of, rows))
    stars = star_over_ring(rows)
    for each in stars:
        print(f"{each['rate']}  gather_scatter / allreduce {each['star']:.2f}; {NODES} +- {100 * REACH:.0f} %")
    worst = max(abs(row["error"]) for row in rows)
    print(f"largest error {100 * worst:.1f} %; reach <= {100 * REACH:.0f} %")
    return finish(args, "ddp ladder", [*rows, *stars], reach=REACH, worst=worst)


if __name__ == "__main__":
    sys.exit(main())
