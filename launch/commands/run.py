"""`muster run JOB.yaml`: start the ranks, watch them, say how it went. The exit code is the verdict's."""

import argparse

from launch.options import add_job, add_runs


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_job(parser)
    add_runs(parser)
    parser.add_argument("--on", choices=["local"], default="local", help="transport (default: local)")
    parser.add_argument("--quiet", action="store_true", help="say nothing unless it fails; logs are kept all the same")


def run(args: argparse.Namespace) -> int:
    """Prepare, then start and supervise."""
    from launch.prepare import prepare
    from launch.start import start_local

    return start_local(prepare(args), quiet=args.quiet).code
