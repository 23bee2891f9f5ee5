"""`muster sweep JOB.yaml --grid KEY=V,V ...`: the product of grids as runs of one job, and a table of how they went."""

import argparse
import shutil
import sys

from muster.launch.common.options import add_json, add_request, given, whole


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = "muster sweep job.yaml --grid train.mode=ddp,zero1 --grid nodes=1,2 --repeat 3"
    add_request(parser)
    parser.add_argument(
        "--grid",
        metavar="KEY=V,V",
        action="append",
        default=[],
        dest="grids",
        help="a key of the job and the values that it takes, such as nodes=1,2,4; all grids are combined",
    )
    again = whole("--repeat", least=1)
    parser.add_argument("--repeat", metavar="N", type=again, default=1, help="run every point N times, for error bars")
    limit = whole("--limit", least=1)
    parser.add_argument("--limit", metavar="N", type=limit, help="in Slurm: at most N points of an array at a time")
    parser.add_argument(
        "--keep-going",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on after a point that has failed (default: yes)",
    )
    parser.add_argument("--show", action="store_true", help="print the table of a sweep again; JOB is then the sweep")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prepare every point, run them, print the table; the exit code is that of the first point that failed."""
    from muster.jobs.basics import exits
    from muster.jobs.basics.errors import MusterError
    from muster.jobs.runfolder.rundir import runs_root
    from muster.launch.submit.request import Request
    from muster.launch.sweeps.sweep import SweepRecord, find_sweep, read_grids
    from muster.launch.sweeps.sweep_make import check, execute, make_sweep, prepare_points, show

    if args.show:
        folder = find_sweep(runs_root(args.runs), args.job)
        return show(SweepRecord.read(folder), folder, as_json=args.json)
    request = given(args, Request)
    check(request, args.grids)
    name, elements = prepare_points(request, read_grids(args.grids, args.repeat), args.limit, args.repeat)
    record, folder = make_sweep(request, name, elements)
    print(f"sweep {folder}", file=sys.stderr)
    try:
        whole = execute(elements, folder, limit=args.limit, keep_going=args.keep_going)
    except MusterError:
        if not any(each.run.path.exists() for each in elements):  # refused: nothing was submitted
            shutil.rmtree(folder, ignore_errors=True)
        raise
    code = show(record, folder, as_json=args.json)
    return code if whole else exits.STOPPED
