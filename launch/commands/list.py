"""`muster list`: a table of the runs in a folder, newest last."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from muster.jobs.runfolder.rundir import find_run, list_runs, runs_root
from muster.launch.common import options, screen
from muster.launch.records.runstate import RunState, read_state
from muster.launch.records.sizes import folder_bytes

NEWEST: Final = 20
COLUMNS: Final[dict[str, Callable[[RunState], object]]] = {
    "run": lambda state: state.run_id,
    "state": lambda state: state.label,
    "kind": lambda state: state.kind,
    "nodes>": lambda state: state.nodes,
    "ranks>": lambda state: state.world_size,
    "started": lambda state: screen.clock(state.started),
    "took>": lambda state: screen.duration(state.seconds),
    "restarts>": lambda state: state.restarts or None,
    "step>": lambda state: state.progress,
    "saved>": lambda state: state.checkpoint and state.checkpoint.step,
    "loss>": lambda state: None if state.loss is None else f"{state.loss:.4f}",
    "outcome": lambda state: state.outcome,
}
SIZE: Final = "size>"
SPARE: Final = ("started", "kind", "nodes>", "outcome", SIZE, "ranks>", "saved>", "restarts>", "took>", "loss>")
READERS: Final = 8  # folders examined at the same time, because network storage answers each question slowly
WHERE_ANY: Final = ("restarts>", "saved>")  # columns shown only if a run has a value


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `muster list`."""
    parser.epilog = "muster list --runs /shared/runs"
    parser.add_argument("--all", action="store_true", help=f"list all runs, not just the newest {NEWEST}")
    options.add_runs(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print one line per run."""
    root = runs_root(args.runs)
    find_run(root, None)  # raises an error with exit code 73 if there is no run
    runs = list_runs(root)
    shown = runs if args.all else runs[-NEWEST:]
    if queued := [each for each in shown if each.slurm.exists()]:
        from muster.launch.records.slurm_job import ask_together

        ask_together(queued)  # one squeue call for all queued runs
    states = [read_state(run) for run in shown]
    with ThreadPoolExecutor(READERS) as pool:
        sizes = list(pool.map(folder_bytes, (run.path for run in shown)))
    if args.json:
        print(
            json.dumps(
                [{**state.to_json(), "bytes": size} for state, size in zip(states, sizes, strict=True)], indent=2
            )
        )
    else:
        print(_table(states, sizes))
    if len(shown) < len(runs):
        print(f"muster: {len(runs) - len(shown)} older runs not shown; --all shows them", file=sys.stderr)
    return 0


def _table(states: Sequence[RunState], sizes: Sequence[int]) -> str:
    cells = {name: [value_of(state) for state in states] for name, value_of in COLUMNS.items()}
    cells[SIZE] = [screen.size(each) for each in sizes]
    shown = {name: column for name, column in cells.items() if name not in WHERE_ANY or set(column) != {None}}
    return screen.table(tuple(shown), zip(*shown.values(), strict=True), spare=SPARE)
