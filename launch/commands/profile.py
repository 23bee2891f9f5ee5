"""`muster profile`: what the ranks of a run recorded where `train.profile` was on."""

import argparse
import json

from muster.jobs.basics.errors import NotFoundError, UsageError
from muster.jobs.runfolder.rundir import find_run, runs_root
from muster.launch.common import options, rankset
from muster.launch.look.profile_view import render
from muster.launch.look.profiles import RankProfile, read_profiles


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `muster profile`."""
    options.add_run(parser)
    options.add_json(parser)
    parser.add_argument("--rank", metavar="LIST", help="say more of these ranks, like 0,8-15 (default: the slowest)")
    parser.add_argument("--attempt", metavar="N", type=int, help="of this attempt (default: the newest with a profile)")


def run(args: argparse.Namespace) -> int:
    """Print the profiles of an attempt."""
    if args.attempt is not None and args.attempt < 0:
        raise UsageError(f"--attempt: must be at least 0, got {args.attempt}")
    folder = find_run(runs_root(args.runs), args.run)
    attempt, profiles = read_profiles(folder, args.attempt)
    chosen = choose(profiles, args.rank)
    if args.json:
        shown = profiles if args.rank is None else chosen
        print(json.dumps({"run": folder.run_id, "attempt": attempt, "ranks": [each.to_json() for each in shown]}))
        return 0
    print(render(folder.run_id, attempt, profiles, chosen))
    return 0


def choose(profiles: list[RankProfile], ranks: str | None) -> list[RankProfile]:
    """Return the ranks that are asked for, by default the slowest.

    Raises:
        UsageError: no list of ranks, or a rank that the run does not have.
        NotFoundError: a rank that has written no profile.
    """
    if ranks is None:
        return profiles[:1]
    wanted = rankset.parse(ranks, option="--rank", count=int(profiles[0].record["world_size"]))
    chosen = [each for each in profiles if each.rank in wanted]
    if missing := wanted - {each.rank for each in chosen}:
        there = rankset.fold(each.rank for each in profiles)
        raise NotFoundError(f"{profiles[0].folder.parent}: no profile of rank {rankset.fold(missing)}, only of {there}")
    return sorted(chosen, key=lambda each: each.rank)
