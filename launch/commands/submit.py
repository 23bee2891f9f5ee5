"""`muster submit JOB.yaml`: start a run and leave. It prints the run's id; status, logs, why and stop do the rest."""

import argparse
import shlex
from typing import TYPE_CHECKING

from muster.launch.common.options import add_job, add_runs, add_transport

if TYPE_CHECKING:
    from muster.launch.submit.prepare import Prepared


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_job(parser, program=True)
    add_runs(parser)
    add_transport(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted, and do nothing")
    parser.add_argument("--parsable", action="store_true", help="print the run's id and nothing else")
    parser.add_argument(
        "--no-snapshot", action="store_true", help="use the code as it will be then, not a copy of what it is now"
    )


def run(args: argparse.Namespace) -> int:
    """Prepare, then hand over."""
    from muster.launch.submit.prepare import prepare
    from muster.launch.submit.queueing import leave, whereabouts

    prepared = prepare(args)
    if args.dry_run:
        return show(prepared)
    run = leave(prepared, snapshot=not args.no_snapshot)
    if args.parsable:
        print(run.run_id)
    else:
        ways = f"{run.command('logs -f')} follows it, {run.command('stop')} ends it"
        print(f"{run.run_id} {whereabouts(run)}; {ways}")
    return 0


def show(prepared: "Prepared") -> int:
    """Print what would be submitted."""
    from muster.launch.commands.plan import commands_of

    if prepared.submission.route.transport == "submitit":
        from muster.launch.scheduler.submitit_run import script as submitit_script

        print(submitit_script(prepared.submission), end="")
    elif prepared.is_queued:
        from muster.launch.scheduler.slurm_run import script

        print(script(prepared.submission), end="")
    else:
        print("\n".join(shlex.join(argv) for argv in commands_of(prepared)))
    return 0
