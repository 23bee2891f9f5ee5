"""`muster profile`: the profiles that a run's ranks recorded because `train.profile` was set."""

import argparse
import json

from muster.launch.common import options
from muster.launch.look.attempts import of_ranks
from muster.launch.look.profile_view import render
from muster.launch.look.profiles import read_profiles


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `muster profile`."""
    parser.epilog = "muster profile RUN     after muster run JOB --set train.profile=true"
    options.add_run(parser)
    options.add_json(parser)
    parser.add_argument(
        "--rank", metavar="LIST", help="show details of these ranks, such as 0,8-15 (default: the slowest)"
    )
    options.add_attempt(parser, "with a profile")


def run(args: argparse.Namespace) -> int:
    """Print the profiles of an attempt."""
    folder = options.the_run(args)
    attempt, profiles = read_profiles(folder, args.attempt)
    asked = args.rank and of_ranks(profiles, args.rank, int(profiles[0].record["world_size"]))
    if args.json:
        ranks = [each.to_json() for each in asked or profiles]
        print(json.dumps({"run": folder.run_id, "attempt": attempt, "ranks": ranks}))
    else:
        print(render(folder.run_id, attempt, profiles, asked or profiles[:1]))
    return 0
