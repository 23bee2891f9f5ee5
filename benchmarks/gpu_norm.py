"""RMSNorm as fused Triton kernels beside a copy of the same bytes, torch's own norms and torch.compile, on one GPU.

    forward       x is read and y is written: as many bytes as a copy of x moves
    both          forward and backward: 2.5 times those bytes at least (x, y; x, dy, dx)

The measurement is that of `muster bench norm`: all sides of a width and dtype take turns, each replayed from a CUDA
graph, so that the host does not count.

    python benchmarks/gpu_norm.py [--rows 50000] [--widths 1024,2048,4096,8192,1000,5000] [--launches 3] [--quick]

Reach: forward at least 0.88 of the copy's bandwidth at widths from 1024 to 8192, in bfloat16 and float32; forward and
backward 1.3 times as fast as the best other side in bfloat16, 1.05 times in float32. `at most` is what 2.5 copies would
reach: where it is less than the reach, the reach takes rows that stay in the cache.
"""

import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from harness import Options, finish, numbers, table

from muster.jobs.basics.rowlog import RowLog
from muster.jobs.timing.files import read_timings
from muster.jobs.timing.records import Timed
from muster.jobs.timing.settings import COPY, TimingSettings
from muster.jobs.train.timing.launch_manager import ModelTimer

REACHED_WIDTHS = (1024, 2048, 4096, 8192)
FORWARD, BOTH = 0.88, {"bf16": 1.3, "fp32": 1.05}
FUSED = "rms_fused"


def measure(settings: TimingSettings) -> tuple[str, list[Timed]]:
    """Time norms in processes of their own; return the name of the GPU, and the rows."""
    with TemporaryDirectory() as folder:
        log = Path(folder, "bench.jsonl")
        ModelTimer(settings, torch.device("cuda:0"), RowLog(log, patient=False, say=print), name="norm").run()
        (timing,) = read_timings([log]).timings
    return timing.header.machine.gpu, timing.rows


def row_of(rows: list[Timed]) -> dict[str, Any]:
    """Judge the rows of one width and precision."""
    seconds = {(row.model, row.pass_name): median(row.steps_s) for row in rows if row.steps_s}
    others = {name: took for (name, each), took in seconds.items() if each == "backward" and name != FUSED}
    best = min(others, key=others.__getitem__)
    copied, width, precision = seconds[COPY, "forward"], rows[0].width, rows[0].precision
    forward, both = copied / seconds[FUSED, "forward"], others[best] / seconds[FUSED, "backward"]
    return {
        "name": f"{width} {precision}",
        "forward_of_copy": forward,
        "both_times_best": both,
        "best": best,
        "at_most": others[best] / (2.5 * copied),
        "copy_gb_s": 1e-9 * (rows[0].bytes_per_s or 0.0),
        "seconds": {" ".join(key): took for key, took in seconds.items()},
        "reached": width not in REACHED_WIDTHS or (forward >= FORWARD and both >= BOTH[precision]),
    }


def main() -> int:
    """Measure and report."""
    parser = Options(__doc__, quick={"launches": 1, "steps": 6})
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--widths", type=numbers, default=[*REACHED_WIDTHS, 1000, 5000])
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    counts = {"batch": args.rows, "warmup": 2, "steps": args.steps, "launches": args.launches}
    settings = TimingSettings.model_validate({"widths": args.widths, "precision": ["bf16", "fp32"], **counts})
    gpu, found = measure(settings)
    groups = [[row for row in found if row.case in group] for group in settings.groups()]
    rows = [row_of(group) for group in groups]
    head = ["", "copy GB/s", "forward / copy", "both: times the best", "best other", "at most"]
    lines = []
    for row in rows:
        cells = [f"{row[key]:.3f}" for key in ("forward_of_copy", "both_times_best", "at_most")]
        lines.append([row["name"], f"{row['copy_gb_s']:.0f}", cells[0], cells[1], row["best"], cells[2]])
    table(head, lines)
    return finish(args, "gpu norm", rows, gpu=gpu)


if __name__ == "__main__":
    sys.exit(main())
