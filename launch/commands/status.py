"""`muster status`: the state of one run, its progress, and its ranks."""

import argparse
import json
import time
from pathlib import Path
from typing import Final

from muster.jobs.basics.words import counted
from muster.jobs.runfolder.rundir import RunDir, runs_root
from muster.launch.common import options, screen
from muster.launch.look.stragglers import why_unjudged, with_stragglers
from muster.launch.records import lease
from muster.launch.records.runstate import DIRECT, RunState, read_state
from muster.launch.sweeps.sweep import SweepRecord, named_sweep

MOST_SHOWN: Final = 1000  # ranks
FAILED: Final = ("failed", "victim")
RANK_COLUMNS: Final = ("rank>", "node>", "host", "pid>", "state", "exit>")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `muster status`."""
    parser.epilog = "muster status RUN --json\nmuster status sweep-vgg11    the table of a sweep"
    options.add_run(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the state of a run, or the table of a sweep."""
    if (sweep := named_sweep(runs_root(args.runs), args.run)) is not None:
        from muster.launch.sweeps.sweep_show import show

        show(SweepRecord.read(sweep), sweep, as_json=args.json)
        return 0
    state = with_stragglers(read_state(options.the_run(args)))
    print(json.dumps(state.to_json(), indent=2) if args.json else render(state))
    return 0


def render(state: RunState) -> str:
    """Format a run's facts, one per line, and a table of its ranks."""
    took = screen.duration(state.seconds)
    facts = [
        ("run", f"{state.run_id}  {state.label}"),
        ("job", _job(state)),
        ("started", f"{screen.clock(state.started)}, {'took ' + took if state.is_over else took + ' ago'}"),
        ("attempt", _attempt(state)),
        ("doing", state.doing),
        ("step", _step(state)),
        ("saved", _saved(state)),
        ("left out", ", ".join(state.left_out)),
        ("outcome", state.outcome),
        ("message", state.message),
        *(("slow", f"{each.name}: {each.evidence}") for each in state.stragglers),
        ("slow", why_unjudged(state)),
        *(("warning", text) for text in state.warnings),
        ("note", _note(state)),
    ]
    lines = [f"{what:9}{value}" for what, value in facts if value]
    if state.ranks:
        failed_first = sorted(state.ranks, key=lambda each: (each.state not in FAILED, each.rank))
        shown = state.ranks if len(state.ranks) <= MOST_SHOWN else failed_first[:MOST_SHOWN]
        rows = ((each.rank, each.node, each.host, each.pid, each.state, each.signal or each.code) for each in shown)
        lines += ["", screen.table(RANK_COLUMNS, rows)]
        more = len(state.ranks) - MOST_SHOWN
        lines += [f"{more:,} more ranks; --json has them all"] if more > 0 else []
    return "\n".join(lines)


def _job(state: RunState) -> str:
    ranks = counted(state.world_size, "rank") if state.world_size else "? ranks"
    nodes = counted(state.nodes, "node") if state.nodes else "? nodes"
    size = f"{ranks} on {nodes}"
    started = "started directly" if state.transport == DIRECT else f"over {state.transport}" if state.transport else ""
    return ", ".join(part for part in (state.kind, size, started) if part)


def _attempt(state: RunState) -> str | None:
    if state.attempt is None:
        return f"{counted(state.restarts + 1, 'attempt')} so far" if state.restarts else None
    return f"{state.attempt}, after {counted(state.restarts, 'restart')}" if state.restarts else str(state.attempt)


def _saved(state: RunState) -> str | None:
    """Describe the newest checkpoint and, while the run continues, its age."""
    if state.checkpoint is None:
        return None
    age = "" if state.is_over else f", {screen.duration(max(0.0, time.time() - state.checkpoint.time))} ago"
    return f"step {state.checkpoint.step}{age} ({state.checkpoint.name})"


def _step(state: RunState) -> str | None:
    step = state.progress
    if step is None:
        return None
    loss = None if state.loss is None else f"loss {state.loss:.4f}"
    rate = None
    if state.rate is not None:
        rate, quartiles = state.rate.words(state.unit)
        rate = rate if state.rate.steps == 1 else f"median of {state.rate.steps} steps {rate} ({quartiles})"
    return ", ".join(part for part in (step, loss, rate) if part)


def _note(state: RunState) -> str | None:
    if state.state == "lost" and not state.sure:
        return (
            f"its supervisor on {state.host} was last heard from {screen.duration(state.heard_s)} ago; "
            f"after {lease.DEAD_S:g} s the run counts as lost"
        )
    if state.state == "lost":
        resumes = state.checkpoint is not None or state.kind == "command"
        run = RunDir(Path(state.path))
        resume = state.continue_with or run.command("resume")
        ways = f"{resume} resumes the run, " * resumes
        ways += f"{run.command('why')} shows what is known, {run.command('stop')} ends leftover processes"
        who = "rank 0" if state.transport == DIRECT else "its supervisor"
        return f"{who} (pid {state.pid}) is gone; {ways}"
    if not state.sure:
        where = f"on {state.host}" if state.host else "on an unknown host"
        return (
            f"its supervisor runs {where}; this is the last state written to the folder; "
            "run muster status there to be sure"
        )
    return None
