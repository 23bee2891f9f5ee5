"""What TCP's congestion control costs collectives here: bbr against reno, in a network namespace of its own.

Runs take turns (reno bbr bbr reno ...), each a job of two ranks over gloo and a private loopback whose setting is
changed; nothing else on the machine is. `results/compare.py` pairs the launches and judges each row, `causes.py` says
what it would tell a user whose result holds both. Nothing is to be reached: the number is the finding's, 1.35x on
all_reduce and 2.2x on a send of 100 MB when it was first measured.

    sudo .venv/bin/python benchmarks/congestion_cost.py [--quick] [--one bbr] [--other reno] [--turns 4]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from muster.collectives_bench.results.causes import findings  # noqa: E402
from muster.collectives_bench.results.compare import comparison  # noqa: E402
from muster.collectives_bench.results.files import read_result  # noqa: E402
from muster.collectives_bench.results.rows import rows_of  # noqa: E402
from muster.collectives_bench.sizes import size_text  # noqa: E402

AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
RANKS = 2
PORT = 29411
LIMIT_S = 120
OTHERS = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # it warns of addresses without a name server
# In a new namespace: its loopback up, its own setting, then two ranks; `wait` gives each one's code.
SCRIPT = """
ip link set lo up && sysctl -qw net.ipv4.tcp_congestion_control="$1" || exit 1
out=$2 python=$3; shift 3
RANK=1 LOCAL_RANK=1 "$python" -m muster.collectives_bench "$@" --out "$out" & other=$!
RANK=0 LOCAL_RANK=0 "$python" -m muster.collectives_bench "$@" --out "$out" >/dev/null || exit 1
wait $other
"""


def run(control: str, out: Path, sizes: str, launches: int) -> None:
    """Run one job under a congestion control."""
    world = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    options = ["--operation", "all_reduce,send_recv,broadcast", "--sizes", sizes, "--launches", str(launches)]
    subprocess.run(
        ["unshare", "--net", "sh", "-c", SCRIPT, "sh", control, str(out), sys.executable, *options, "--check", "false"],
        env={**os.environ, **world, **OTHERS, "MASTER_PORT": str(PORT), "PYTHONPATH": str(REPOSITORY)},
        check=True,
        timeout=LIMIT_S,
    )


def main() -> int:
    """Measure both in turns, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", default="bbr")
    parser.add_argument("--other", default="reno")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--launches", type=int, default=2, help="of each turn: neighbours in time are compared")
    parser.add_argument("--quick", action="store_true", help="small sizes, a minute")
    args = parser.parse_args()
    known = AVAILABLE.read_text().split()
    if missing := {args.one, args.other} - set(known):
        parser.error(f"this kernel has {', '.join(known)}, and no {', '.join(sorted(missing))}; try modprobe tcp_bbr")
    paths: dict[str, list[Path]] = {args.one: [], args.other: []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.turns):
            for control in (args.other, args.one) if turn % 2 == 0 else (args.one, args.other):
                path = Path(folder) / f"{turn}-{control}.jsonl"
                run(control, path, "1M,4M" if args.quick else "1M,10M,100M", args.launches)
                paths[control].append(path)
        before, after = (rows_of(read_result(paths[control])) for control in (args.other, args.one))
        told = [each.text for each in findings(read_result([*paths[args.one], *paths[args.other]])) if each.measured]
    found = comparison(before, after)
    print(f"{args.one} against {args.other}: {found.line()}")
    for row in [*found.rows, found.together]:
        name = f"{row.cell.operation} {size_text(row.nbytes or 0)}" if row.cell else "all together"
        numbers = "" if row.ratio is None else f"{row.ratio:6.2f}x ({row.low:.2f} .. {row.high:.2f})  "
        print(f"  {name:22}{numbers}{row.verdict}: {row.why}")
    for text in told:
        print(f"  {text}")
    rows = {f"{row.cell.operation}/{row.nbytes}": row.ratio for row in found.rows if row.cell}
    print(json.dumps({"benchmark": "congestion_cost", "one": args.one, "other": args.other, "ratios": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
