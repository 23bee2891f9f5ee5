"""`muster rm RUN ...`: remove the folders of runs and sweeps that are over."""

import argparse
import json
from pathlib import Path

from muster.jobs.basics.words import counted
from muster.jobs.runfolder.rundir import RunDir, find_run, runs_root
from muster.launch.common import options, screen
from muster.launch.records.sizes import folder_bytes
from muster.launch.submit.codestore import collect
from muster.launch.submit.removing import check_run, complete_removals, remove_run
from muster.launch.sweeps.sweep import named_sweep
from muster.launch.sweeps.sweep_remove import check_sweep, remove_sweep, runs_of


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `muster rm`."""
    parser.epilog = "muster rm RUN RUN\nmuster rm sweep-vgg11 --dry-run    a sweep and all its runs"
    parser.add_argument("runs_given", metavar="RUN|SWEEP", nargs="+", help="a run or a sweep, or part of its name")
    parser.add_argument("--dry-run", action="store_true", help="check and show what would be removed, but keep it")
    options.add_runs(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Find and check everything, then remove it."""
    root = runs_root(args.runs)
    found: dict[Path, bool] = {}  # {folder: True if it is a sweep's}
    for given in args.runs_given:
        sweep = named_sweep(root, given)
        found[sweep or find_run(root, given, unique=True).path] = sweep is not None
    for folder, is_sweep in found.items():
        if is_sweep:
            check_sweep(folder)
        else:
            check_run(RunDir(folder))
    inside = {folder: [each.path for each in runs_of(folder)] if sweep else [] for folder, sweep in found.items()}
    sizes = {folder: sum(map(folder_bytes, [folder, *inside[folder]])) for folder in found}
    if not args.dry_run:
        for folder, is_sweep in found.items():
            if is_sweep:
                remove_sweep(folder)
            else:
                remove_run(RunDir(folder))
        for parent in {folder.parent for folder in found}:
            complete_removals(parent)
            collect(parent)
    did = "would remove" if args.dry_run else "removed"
    if args.json:
        rows = [{"name": each.name, "runs": len(inside[each]), "bytes": size} for each, size in sizes.items()]
        print(json.dumps({"removed": rows, "dry_run": args.dry_run}, indent=2))
        return 0
    for folder, size in sizes.items():
        runs = f" and its {counted(len(inside[folder]), 'run')}" if found[folder] else ""
        print(f"{did} {folder.name}{runs} ({screen.size(size)})")
    return 0
