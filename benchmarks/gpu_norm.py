"""RMSNorm as fused Triton kernels beside a copy of the same bytes, torch's own norms and torch.compile, on one GPU.

    forward       x is read and y is written: as many bytes as a copy of x moves
    both          forward and backward: 2.5 times those bytes at least (x, y; x, dy, dx)

The measurement is that of `jobs/examples/kernels/norms.py`: all sides of a width and dtype take turns, each replayed
from a CUDA graph, so that the host does not count.

    python benchmarks/gpu_norm.py [--rows 50000] [--widths 1024,2048,4096,8192,1000,5000] [--samples 60] [--quick]

Reach: forward at least 0.88 of the copy's bandwidth at widths from 1024 to 8192, in bfloat16 and float32; forward and
backward 1.3 times as fast as the best other side in bfloat16, 1.05 times in float32. `at most` is what 2.5 copies would
reach: where it is less than the reach, the reach takes rows that stay in the cache.
"""

import sys
from typing import Any

import torch
from harness import Options, finish, numbers, table

from muster.jobs.examples.kernels.norms import DTYPES, MOVED, NORMS, Key, measure

REACHED_WIDTHS = (1024, 2048, 4096, 8192)
FORWARD, BOTH = 0.88, {"bf16": 1.3, "fp32": 1.05}
FUSED = "rms_fused"


def row_of(x: torch.Tensor, precision: str, seconds: dict[Key, float]) -> dict[str, Any]:
    """Judge the times of one width and precision."""
    others = {name: took for (name, each), took in seconds.items() if each == "both" and name != FUSED}
    best = min(others, key=others.__getitem__)
    copied, width = seconds["copy", "forward"], x.shape[1]
    forward, both = copied / seconds[FUSED, "forward"], others[best] / seconds[FUSED, "both"]
    return {
        "name": f"{width} {precision}",
        "forward_of_copy": forward,
        "both_times_best": both,
        "best": best,
        "at_most": others[best] / (2.5 * copied),
        "copy_gb_s": 1e-9 * MOVED["forward"] * x.nbytes / copied,
        "seconds": {" ".join(key): took for key, took in seconds.items()},
        "reached": width not in REACHED_WIDTHS or (forward >= FORWARD and both >= BOTH[precision]),
    }


def main() -> int:
    """Measure and report."""
    parser = Options(__doc__, quick={"samples": 6})
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--widths", type=numbers, default=[*REACHED_WIDTHS, 1000, 5000])
    parser.add_argument("--samples", type=int, default=60)
    args = parser.parse_args()
    rows = []
    for precision in BOTH:
        for width in args.widths:
            x = torch.randn(args.rows, width, device="cuda").to(DTYPES[precision])
            rows.append(row_of(x, precision, measure(x, list(NORMS), args.samples)))
    head = ["", "copy GB/s", "forward / copy", "both: times the best", "best other", "at most"]
    lines = []
    for row in rows:
        cells = [f"{row[key]:.3f}" for key in ("forward_of_copy", "both_times_best", "at_most")]
        lines.append([row["name"], f"{row['copy_gb_s']:.0f}", cells[0], cells[1], row["best"], cells[2]])
    table(head, lines)
    return finish(args, "gpu norm", rows, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    sys.exit(main())
