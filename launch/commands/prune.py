"""`muster prune`: remove the runs of a folder that are over, by age, number and state."""

import argparse
import json
import time
from typing import Any

from muster.jobs.basics.errors import MusterError, UsageError
from muster.jobs.basics.words import counted
from muster.jobs.runfolder.rundir import RunDir, list_runs, runs_root
from muster.launch.common import options, screen
from muster.launch.records.runstate import read_state
from muster.launch.records.sizes import folder_bytes
from muster.launch.submit.codestore import collect
from muster.launch.submit.pruning import PruneRule, age, chosen, end_of, state_names
from muster.launch.submit.removing import check_run, complete_removals, remove_run
from muster.launch.sweeps.sweep_remove import live_runs, remove_emptied


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `muster prune`."""
    parser.epilog = "muster prune --older-than 30d --dry-run\nmuster prune --state failed,lost --keep 5"
    parser.add_argument(
        "--older-than", metavar="AGE", help="only runs that ended at least this long ago: 90m, 12h, 30d, 8w"
    )
    least = options.whole("--keep", least=0)
    parser.add_argument(
        "--keep", metavar="N", type=least, help="keep the newest N of the runs that the other options select"
    )
    parser.add_argument("--state", metavar="STATE,...", help="only runs in these states: done, failed, stopped, lost")
    parser.add_argument("--dry-run", action="store_true", help="show the runs, but keep them")
    options.add_runs(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Choose the runs, remove them, and print them; return the code of the first run that could not be removed."""
    rule, root = _rule(args), runs_root(args.runs)
    rows: list[dict[str, Any]] = []
    code = 0
    live = live_runs(root)
    states = [read_state(each) for each in list_runs(root) if each.run_id not in live]
    for state in chosen(states, rule, time.time()):
        folder = RunDir(root / state.run_id)
        row = {"run_id": state.run_id, "state": state.state, "ended": end_of(state), "bytes": folder_bytes(folder.path)}
        try:
            if args.dry_run:
                check_run(folder)
            else:
                remove_run(folder)
        except MusterError as error:  # continue with the other runs
            screen.say(str(error))
            code = code or error.exit_code
            continue
        rows.append(row)
    if not args.dry_run:
        remove_emptied(root, [row["run_id"] for row in rows])
        complete_removals(root)
        collect(root)
    _show(rows, args)
    return code


def _rule(args: argparse.Namespace) -> PruneRule:
    if args.older_than is args.state is args.keep is None:
        raise UsageError("prune: choose the runs to remove: --older-than AGE, --keep N or --state STATE; all: --keep 0")
    rule = PruneRule(keep=args.keep or 0)
    states = rule.states if args.state is None else state_names(args.state)
    return PruneRule(states, 0.0 if args.older_than is None else age(args.older_than), rule.keep)


def _show(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps({"removed": rows, "dry_run": args.dry_run}, indent=2))
        return
    if rows:
        cells = ([row["run_id"], row["state"], screen.clock(row["ended"]), screen.size(row["bytes"])] for row in rows)
        print(screen.table(("run", "state", "ended", "size>"), cells))
    did = "would remove" if args.dry_run else "removed"
    screen.say(f"{did} {counted(len(rows), 'run')}, {screen.size(sum(row['bytes'] for row in rows))}")
