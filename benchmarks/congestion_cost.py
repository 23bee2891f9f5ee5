"""Measure how much slower collectives are with TCP's congestion control bbr than with reno.

Each run is a job of two ranks that talk over gloo through a loopback interface. `unshare` gives each run a network
namespace, so its congestion control can be changed without affecting the machine. The runs alternate:

    reno  bbr  bbr  reno  reno  bbr  ...        `--turns` runs of each, so slow drifts of the machine cancel out

The output has one row per operation and size: the time with bbr divided by the time with reno, the interval of this
ratio, and the verdict of `muster bench compare`. Below are the lines on congestion control that `muster bench` would
print for a result with runs of both kinds. There is no target to reach. The first measurement gave 1.35x for all_reduce
and 2.2x for a send of 100 MB; `collectives_bench/results/causes.py` quotes these numbers.

    sudo .venv/bin/python benchmarks/congestion_cost.py [--quick] [--one bbr] [--other reno] [--turns 4]
"""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from harness import Options, finish, turns
from ranks import BOX_PORT, QUIET, ROOT

from muster.collectives_bench.results.causes import findings
from muster.collectives_bench.results.files import read_result
from muster.collectives_bench.results.rows import rows_of
from muster.jobs.measuring.compare import comparison

AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
RANKS = 2
LIMIT_S = 120
# In a new namespace: its loopback up, its own setting, then two ranks; `wait` gives each one's code.
SCRIPT = """
ip link set lo up && sysctl -qw net.ipv4.tcp_congestion_control="$1" || exit 1
out=$2 python=$3; shift 3
RANK=1 LOCAL_RANK=1 "$python" -m muster.collectives_bench "$@" --out "$out" & other=$!
RANK=0 LOCAL_RANK=0 "$python" -m muster.collectives_bench "$@" --out "$out" >/dev/null || exit 1
wait $other
"""


def run(control: str, folder: Path, sizes: str, launches: int) -> Path:
    """Run one job under a congestion control; return its records."""
    out = folder / f"{len(list(folder.iterdir()))}-{control}.jsonl"
    world = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    options = ["--operation", "all_reduce,send_recv,broadcast", "--sizes", sizes, "--launches", str(launches)]
    subprocess.run(
        ["unshare", "--net", "sh", "-c", SCRIPT, "sh", control, str(out), sys.executable, *options, "--check", "false"],
        env={**os.environ, **world, **QUIET, "MASTER_PORT": str(BOX_PORT), "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=LIMIT_S,
    )
    return out


def main() -> int:
    """Measure both in turns, compare, report."""
    parser = Options(__doc__, quick={"sizes": "1M,4M"}, note="small sizes, a minute")
    parser.set_defaults(sizes="1M,10M,100M")
    parser.add_argument("--one", default="bbr")
    parser.add_argument("--other", default="reno")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--launches", type=int, default=2, help="of each turn: neighbours in time are compared")
    args = parser.parse_args()
    known = AVAILABLE.read_text().split()
    if missing := {args.one, args.other} - set(known):
        parser.error(f"this kernel has {', '.join(known)}, and no {', '.join(sorted(missing))}; try modprobe tcp_bbr")
    with tempfile.TemporaryDirectory() as folder:
        controls = (args.other, args.one)
        sides = {each: partial(run, each, Path(folder), args.sizes, args.launches) for each in controls}
        paths = turns(sides, args.turns)
        before, after = (rows_of(read_result(paths[control])) for control in (args.other, args.one))
        told = [each.text for each in findings(read_result([*paths[args.one], *paths[args.other]])) if each.measured]
    found = comparison(before, after)
    print(f"{args.one} against {args.other}: {found.line()}")
    for row in [*found.rows, found.together]:
        name = row.row.named(in_full=False) if row.row else "all together"
        numbers = "" if row.ratio is None else f"{row.ratio:6.2f}x ({row.low:.2f} .. {row.high:.2f})  "
        print(f"  {name:22}{numbers}{row.verdict}: {row.why}")
    for text in told:
        print(f"  {text}")
    rows = [
        {"name": f"{row.row.cell.operation}/{row.row.nbytes}", "reached": True, "ratio": row.ratio}
        for row in found.rows
        if row.row
    ]
    return finish(args, "congestion_cost", rows, one=args.one, other=args.other)


if __name__ == "__main__":
    sys.exit(main())
