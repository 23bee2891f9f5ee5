"""`muster sweep JOB.yaml --grid KEY=V,V ...`: runs of a job with all combinations of grid values, and their results."""

import argparse
import sys
from typing import TYPE_CHECKING

from muster.launch.common.options import add_json, add_request, given, whole

if TYPE_CHECKING:
    from pathlib import Path

    from muster.launch.sweeps.sweep import SweepRecord
    from muster.launch.sweeps.sweep_run import PointRun


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = (
        "muster sweep job.yaml --grid train.mode=ddp,zero1 --grid nodes=1,2 --repeat 3\n"
        "muster sweep job.yaml --zip nodes=1,2,4 train.batch_size=64,128,256    weak scaling: 3 points"
    )
    add_request(parser)
    parser.add_argument(
        "--grid",
        metavar="KEY=V,V",
        action="append",
        default=[],
        dest="grids",
        help="a key of the job and its values, such as nodes=1,2,4; several grids are combined",
    )
    parser.add_argument(
        "--zip",
        metavar="KEY=V,V",
        nargs="+",
        action="append",
        default=[],
        dest="zips",
        help="keys whose values go in pairs, such as nodes=1,2,4 train.batch_size=64,128,256",
    )
    again = whole("--repeat", least=1)
    parser.add_argument("--repeat", metavar="N", type=again, default=1, help="run every point N times, for error bars")
    limit = whole("--limit", least=1)
    parser.add_argument(
        "--limit", metavar="N", type=limit, help="Slurm only: run at most N points of an array at a time"
    )
    parser.add_argument(
        "--keep-going",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="continue after a failed point (default: yes)",
    )
    parser.add_argument("--dry-run", action="store_true", help="check all points and show them, but run nothing")
    parser.add_argument(
        "--show", action="store_true", help="print the table of an existing sweep; give the sweep as JOB"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prepare all points, run them, print the table; return the exit code of the first failed point."""
    from muster.jobs.runfolder.rundir import RunDir, runs_root
    from muster.launch.submit.claim import claimed
    from muster.launch.submit.request import Request
    from muster.launch.sweeps.grids import read_grids
    from muster.launch.sweeps.sweep import SweepRecord, find_sweep
    from muster.launch.sweeps.sweep_make import check, make_sweep, prepare_points, preview
    from muster.launch.sweeps.sweep_show import show

    if args.show:
        folder = find_sweep(runs_root(args.runs), args.job)
        return show(SweepRecord.read(folder), folder, as_json=args.json)
    request = given(args, Request)
    check(request, [("--grid", word) for word in args.grids] + [("--zip", word) for zip_ in args.zips for word in zip_])
    name, elements = prepare_points(request, read_grids(args.grids, args.repeat, args.zips), args.limit, args.repeat)
    if args.dry_run:
        print(preview(elements, as_json=args.json))
        return 0
    record, folder, points = make_sweep(request, name, elements)
    print(f"sweep {folder}", file=sys.stderr)
    with claimed(RunDir(folder)):
        return run_points(record, points, folder, args)


def run_points(record: "SweepRecord", points: "list[PointRun]", folder: "Path", args: argparse.Namespace) -> int:
    """Run points of a sweep and print its table; return the code of the first failed point, or STOPPED after a stop."""
    from muster.jobs.basics import exits
    from muster.launch.sweeps.sweep_make import execute
    from muster.launch.sweeps.sweep_show import show

    whole = execute(points, folder, limit=args.limit, keep_going=args.keep_going)
    code = show(record, folder, as_json=args.json)
    return code if whole else exits.STOPPED
