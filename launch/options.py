"""Options that several subcommands share, so that they are spelt and explained once."""

import argparse


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add `--runs DIR`: where all runs are."""
    parser.add_argument("--runs", metavar="DIR", help="folder of all runs (default: MUSTER_RUNS, else ./runs)")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the optional run."""
    parser.add_argument("run", metavar="RUN", nargs="?", help="its id, a unique part of it, or its folder (the newest)")
    add_runs(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`: data on standard output, talk on standard error."""
    parser.add_argument("--json", action="store_true", help="print data as JSON")


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add the job file and what may be said about it from outside."""
    parser.add_argument("job", metavar="JOB", help="the job file (YAML)")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override one value of the job, as in train.optimizer.lr=0.1; may be repeated",
    )
    parser.add_argument("--site", metavar="FILE", help="the site file: what belongs to this cluster and not to the job")
    parser.add_argument("--name", help="name of the run (default: the job's)")
