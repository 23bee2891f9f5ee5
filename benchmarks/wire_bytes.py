"""The bytes that every operation really moves, as the interface counts, against its formula: n = 2, 3, 4 gloo ranks.

    best     what the best algorithm sends, over all ranks, divided by S      collectives_bench/catalog.py
    known    what this library's source says it sends                         collectives_bench/known.py
    counted  `muster bench --wire`: payload on the loopback of a network namespace where nothing else speaks

Counted is to be known within 1 %; where known is not best, that is a deviation of the library's, and it is named.

    sudo .venv/bin/python benchmarks/wire_bytes.py [--size 10M] [--ranks 2,3,4]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

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


def main() -> int:
    """Count, compare, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="10M")
    parser.add_argument("--ranks", default="2,3,4")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wire-bytes-") as folder:
        blocks = measure(args.size, args.ranks, Path(folder))
    rows, worst, missing = [], 0.0, []
    print(f"# bytes on the wire / S, all ranks together, S = {args.size}, gloo\n")
    print(f"{'operation':<24} {'place':<5} {'n':>2} {'counted':>9} {'known':>9} {'best':>9} {'error':>8}")
    for block in sorted(blocks, key=lambda each: (each.world.ranks, each.cell.operation)):
        where = (block.cell.operation, block.cell.place, block.world.ranks)
        counted = block.wire
        if block.state != "ok" or counted is None:
            missing.append(f"{' '.join(map(str, where))}: {block.state} {block.reason}")
            continue
        if counted.best_bytes < LEAST_JUDGED:
            continue  # a barrier has no payload
        error = counted.sent_bytes / counted.known_bytes - 1
        worst = max(worst, abs(error))
        shares = [each / block.nbytes for each in (counted.sent_bytes, counted.known_bytes, counted.best_bytes)]
        numbers = " ".join(f"{share:9.4f}" for share in shares)
        said = deviation(block.cell.operation, counted)
        print(f"{where[0]:<24} {where[1]:<5} {where[2]:>2} {numbers} {error:>8.2%}  {said}")
        rows.append([*where, *(round(share, 5) for share in shares), said])
    for line in missing:
        print(f"not counted: {line}")
    reached = bool(rows) and worst <= REACH and not missing
    print(f"\nlargest error {worst:.3%}; reach <= {REACH:.0%}: {'yes' if reached else 'NO'}")
    record = {"benchmark": "wire bytes", "reached": reached, "worst": worst, "reach": REACH, "size": args.size}
    print(
        json.dumps({**record, "columns": ["operation", "place", "n", "counted", "known", "best", "said"], "rows": rows})
    )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
