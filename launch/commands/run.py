"""`muster run JOB.yaml`: a supervised run of a job. The exit code is that of the verdict."""

import argparse

from muster.launch.common.options import add_request, given


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = (
        "muster run job.yaml --set train.batch_size=128\n"
        "muster run job.yaml -H hosts.txt -N 2 -n 4      four ranks on each of two hosts\n"
        "muster run -n 4 train.py --lr 3e-4              a script instead of a job file"
    )
    add_request(parser)
    parser.add_argument(
        "--quiet", action="store_true", help="print nothing unless the run fails; logs are still written"
    )
    parser.add_argument(
        "--tee", action="store_true", help="print the output of every rank, each line prefixed with its rank"
    )
    parser.add_argument("--detach", action="store_true", help="return once the run has begun, like muster submit")


def run(args: argparse.Namespace) -> int:
    """Prepare, start and supervise the run; a queued run is submitted and followed.

    Raises:
        UsageError: if `--tee` would have no effect.
    """
    from muster.jobs.basics.errors import UsageError
    from muster.launch.submit.prepare import prepare
    from muster.launch.submit.request import Request
    from muster.launch.submit.start import begin
    from muster.launch.supervision.console import Console

    for name in ("quiet", "detach"):
        if args.tee and getattr(args, name):
            raise UsageError(
                f"--tee: has no effect with --{name}; leave one out, or use muster logs -f to see every rank"
            )
    prepared = prepare(given(args, Request)).changed(tee=args.tee)
    return begin(prepared, Console(quiet=args.quiet, tee=args.tee), detach=args.detach)
