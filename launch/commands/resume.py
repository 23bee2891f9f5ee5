"""`muster resume RUN`: a new attempt of a run that is over, from its newest good checkpoint; or the rest of a sweep."""

import argparse
import sys
from typing import TYPE_CHECKING

from muster.launch.common import options

if TYPE_CHECKING:
    from pathlib import Path

    from muster.launch.submit.request import Request


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = (
        "muster resume RUN\n"
        "muster resume RUN -e node7 --nodes 3            exclude a node\n"
        "muster resume RUN --from 400                    start from an older checkpoint\n"
        "muster resume sweep-vgg11                       run the points of a sweep that are not finished"
    )
    options.add_run(parser)
    parser.add_argument(
        "--from",
        metavar="STEP|NAME",
        dest="origin",
        help="checkpoint to start from, by step or name (default: the newest good one in muster checkpoint list)",
    )
    parser.add_argument("--detach", action="store_true", help="return once the attempt has begun, like muster submit")
    parser.add_argument(
        "--quiet", action="store_true", help="print nothing unless the run fails; logs are still written"
    )
    changes = parser.add_argument_group("changes", "all other settings are those of the run")
    options.add_changes(changes)
    changes.add_argument("--site", metavar="FILE", help="another site file (default: the run's)")
    options.add_transport(parser)


def run(args: argparse.Namespace) -> int:
    """Check that the run can resume, then start it like `muster run`; return the exit code of the verdict."""
    from muster.jobs.runfolder.rundir import runs_root
    from muster.launch.submit import resume
    from muster.launch.submit.claim import claimed
    from muster.launch.submit.request import Request
    from muster.launch.submit.start import begin
    from muster.launch.supervision.console import Console
    from muster.launch.sweeps.sweep import named_sweep

    def say(text: str) -> None:
        if not args.quiet:
            print(f"muster: {text}", file=sys.stderr)

    request = options.given(args, Request)
    if (sweep := named_sweep(runs_root(args.runs), args.run)) is not None:
        return _resume_sweep(sweep, args, request)
    folder = options.the_run(args, unique=True)
    with claimed(folder):
        prepared = resume.again(folder, request, args.origin, say)
        return begin(
            prepared,
            Console(quiet=args.quiet),
            detach=args.detach,
            write=lambda ready: resume.write(ready, request.overrides),
        )


def _resume_sweep(folder: "Path", args: argparse.Namespace, request: "Request") -> int:
    """Run the unfinished points of a sweep with the settings they had; return the code of `muster sweep`."""
    from muster.jobs.basics.errors import UsageError
    from muster.jobs.runfolder.rundir import RunDir
    from muster.launch.commands.sweep import run_points
    from muster.launch.submit.claim import claimed
    from muster.launch.submit.request import Request
    from muster.launch.sweeps.sweep import SweepRecord, say
    from muster.launch.sweeps.sweep_resume import again, remaining
    from muster.launch.sweeps.sweep_show import show

    if request != Request(runs=args.runs, on=None) or args.origin or args.detach:
        raise UsageError(
            f"{folder.name}: the points of a sweep resume with the settings they had; use no option except --runs, "
            "or resume one run of the sweep"
        )
    args.limit, args.keep_going, args.json = None, True, False
    with claimed(RunDir(folder)):
        record = SweepRecord.read(folder)
        points = remaining(record, folder)
        if points:
            return run_points(*again(record, folder, points), folder, args)
    say(f"muster: {folder.name}: every point is done or failed; to resume a failed one, name its run")
    return show(record, folder, as_json=False)
