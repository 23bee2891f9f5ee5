"""The bytes that every operation really moves, as the interface counts, against its formula: n = 2, 3, 4 gloo ranks.

    best     what the best algorithm sends, over all ranks, divided by S      collectives_bench/catalog.py
    known    what this library's source says it sends                         collectives_bench/known.py
    counted  `muster bench --wire`: payload on the loopback of a network namespace where nothing else speaks

Counted is to be known within 1 %; where known is not best, that is a deviation of the library's, and it is named.

    sudo .venv/bin/python benchmarks/wire_bytes.py [--size 10M] [--ranks 2,3,4]
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import Options, finish, table

from muster.collectives_bench.known import LEAST_JUDGED, deviation
from muster.collectives_bench.records import Block
from muster.collectives_bench.results.files import read_result

REACH = 0.01
LIMIT_S = 300
# `lo` of a new namespace is down; what follows is the command that is run in it.
ALONE = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def measure(size: str, ranks: str, folder: Path) -> list[Block]:
    """Run the command in a network namespace of its own; return its blocks."""
    argv = [*ALONE, sys.executable, "-m", "muster", "bench", "all,ours", "--wire", "-N", "1", "-n", ranks]
    argv += ["--sizes", size, "--launches", "1", "--block-s", "0.02", "--runs", str(folder)]
    argv += ["--out", str(folder / "wire.json")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if not (folder / "wire.json").is_file():
        raise SystemExit(f"muster bench ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return read_result([folder / "wire.json"]).blocks


def row_of(block: Block) -> dict[str, Any] | None:
    """Compare what was counted with what is known; a barrier has no payload, and no row."""
    row: dict[str, Any] = {"operation": block.cell.operation, "place": block.cell.place, "n": block.world.ranks}
    counted = block.wire
    if block.state != "ok" or counted is None:
        return {**row, "said": f"not counted: {block.state} {block.reason}", "reached": False}
    if counted.best_bytes < LEAST_JUDGED:
        return None
    shares = (counted.sent_bytes, counted.known_bytes, counted.best_bytes)
    row |= {key: each / block.nbytes for key, each in zip(("counted", "known", "best"), shares, strict=True)}
    error = counted.sent_bytes / counted.known_bytes - 1
    said = deviation(block.cell.operation, counted)
    return {**row, "error": error, "said": said, "reached": abs(error) <= REACH}


def main() -> int:
    """Count, compare, report."""
    parser = Options(__doc__)
    parser.add_argument("--size", default="10M")
    parser.add_argument("--ranks", default="2,3,4")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wire-bytes-") as folder:
        blocks = measure(args.size, args.ranks, Path(folder))
    blocks.sort(key=lambda each: (each.world.ranks, each.cell.operation))
    rows = [row for block in blocks if (row := row_of(block)) is not None]
    print(f"# bytes on the wire / S, all ranks together, S = {args.size}, gloo\n")
    head = ["operation", "place", "n", "counted", "known", "best"]
    lines = []
    for row in rows:
        cells = [f"{row[key]:.4f}" if isinstance(row.get(key), float) else str(row.get(key, "-")) for key in head]
        lines.append([*cells, f"{row['error']:+.2%}" if "error" in row else "-", row["said"]])
    table([*head, "error", ""], lines)
    worst = max((abs(row["error"]) for row in rows if "error" in row), default=0.0)
    print(f"\nlargest error {worst:.3%}; reach <= {REACH:.0%}")
    return finish(args, "wire bytes", rows, worst=worst, reach=REACH, size=args.size)


if __name__ == "__main__":
    sys.exit(main())
