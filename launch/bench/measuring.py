"""`muster bench` measures: one run for each world of the grid, one after another, then one result of all of them."""

import argparse
import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster.collectives_bench.settings import ALL, BenchSettings
from muster.jobs.basics import exits
from muster.jobs.basics.errors import MusterError, RefusedError, UsageError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.bench import choices, report, words
from muster.launch.bench.live import CollectivesView
from muster.launch.bench.report import say
from muster.launch.bench.watching import BenchConsole, View, watching
from muster.launch.common.options import given
from muster.launch.common.program_words import COMMAND_LINE
from muster.launch.scheduler.held_signals import ended_by_signal
from muster.launch.scheduler.slurm_run import close
from muster.launch.submit.hostsource import site_of
from muster.launch.submit.prepare import Prepared, prepare, route_of
from muster.launch.submit.request import Request
from muster.launch.submit.start import begin
from muster.slurm.states import Outcome

RANKS_HERE: Final = 2  # of a job without a file on this machine, where it has not several GPUs
NODES_AWAY: Final = 2  # of one in a queue, where no hosts are named


@dataclass(frozen=True)
class World:
    """One run that is to be made, or why it cannot be."""

    label: str
    prepared: Prepared | None
    refusal: MusterError | None = None


def measure(args: argparse.Namespace) -> int:
    """Measure, show and write; return the exit code: that of the first world that failed, or 1 for a bad result.

    Raises:
        MusterError: nothing could begin.
    """
    check(args)
    worlds = prepare_worlds(args)
    codes, runs, unmeasured = [], [], []
    for number, world in enumerate(worlds, 1):
        if len(worlds) > 1:
            say(f"[{number}/{len(worlds)}] {world.label}")
        codes.append(run_world(world))
        run = world.prepared.context.run if world.prepared is not None else None
        if run is not None and has_rows(run):
            runs.append(run)
        else:
            unmeasured.append(world.label)
        if codes[-1] == exits.STOPPED or (run is not None and ended_by_signal(run)):
            unmeasured += [each.label for each in worlds[number:]]
            break
    code = next((code for code in codes if code), 0)
    if not runs:
        return code or 1
    from muster.collectives_bench.results.files import read_result
    from muster.collectives_bench.results.rows import rows_of

    result = read_result([run.path for run in runs])
    if args.json and unmeasured:
        say(f"muster: not measured: {'; '.join(unmeasured)}")
    bad = report.of_collectives(result, unmeasured).deliver(args)
    if args.plot is not None:
        report.plot(rows_of(result), Path(args.plot))
    return code or bad


def check(args: argparse.Namespace) -> None:
    """Refuse what could not end well, before anything starts.

    Raises:
        UsageError: it could not.
    """
    if args.on == "hand":
        raise UsageError(
            "--on hand: muster bench starts its runs itself; write a job file, start it by muster cmd JOB.yaml, and "
            "see it by muster bench show RUN"
        )
    choices.check_output("--out", args.out, (".json",))
    choices.check_output("--plot", args.plot, choices.PLOTS)
    if args.plot is not None and args.pairs:
        raise UsageError(f"--plot {args.plot}: pairs are measured at one size, which is no line; leave one of both out")
    what = ",".join(args.what)
    if args.pairs and (args.wire or (what and not words.is_file(what))):
        unused = "--wire" if args.wire else what
        raise UsageError(f"--pairs: sends messages between nodes, and measures no operation; leave {unused} out")
    if not what and not args.pairs:
        raise UsageError(
            "WHAT: is missing; name a job file, or operations such as all_reduce,broadcast, or all, or give --pairs"
        )


def prepare_worlds(args: argparse.Namespace) -> list[World]:
    """Prepare a run for each world, before anything starts. A world that is refused alone is left out of the grid.

    Raises:
        UsageError, JobFileError: the command line or the job file is wrong.
        RefusedError: no world is possible.
    """
    settings = words.changes(args)
    what = ",".join(args.what)
    of_file = words.is_file(what)
    names = [] if of_file else words.operations(what) if what else [ALL]
    worlds = []
    for nodes, ranks in words.worlds(args):
        changed = copy.copy(args)
        if of_file:
            changed.job, changed.job_text = what, None
            changed.nodes, changed.ranks_per_node = nodes, ranks
            changed.overrides = [*words.overrides(settings), *args.overrides]
        else:
            usual = usual_world(args, settings.get("device", "auto"), nodes)
            nodes, ranks = nodes or usual[0], ranks or usual[1]
            changed.job, changed.job_text = COMMAND_LINE, words.job_text(names, settings, nodes, ranks)
            changed.nodes = changed.ranks_per_node = None
        worlds.append(prepare_world(changed, f"nodes={nodes} ranks_per_node={ranks}"))
    refusals = [world.refusal for world in worlds if world.refusal is not None]
    if len(refusals) == len(worlds):
        raise refusals[0]
    return worlds


def prepare_world(args: argparse.Namespace, label: str) -> World:
    """Prepare one run; errors as `prepare_worlds`, but for a refusal."""
    try:
        prepared = prepare(given(args, Request))
    except RefusedError as error:
        return World(label, None, error)
    settings = prepared.context.job.settings
    if not isinstance(settings, BenchSettings):
        kind = prepared.context.job.kind
        raise UsageError(f"{args.job}: is a {kind}: job; muster bench measures bench: jobs, muster run runs it")
    if settings.is_hello:
        raise UsageError(f"{args.job}: hello measures nothing; start it by muster run")
    return World(label, prepared)


def usual_world(args: argparse.Namespace, device: str, nodes: int | str | None) -> tuple[int, int]:
    """Return nodes and ranks per node where nobody says: all hosts that are named; here the GPUs, else two ranks."""
    request = given(args, Request)
    route = route_of(request, site_of(request))
    if not route.is_here:
        return len(route.hosts.hosts) or NODES_AWAY, 1
    if args.pairs:
        return 2, 1
    if nodes not in (None, 1):
        return 1, 1
    from muster.launch.common.host import visible_gpus

    gpus = len(visible_gpus()) if device != "cpu" else 0
    return 1, gpus if gpus > 1 else RANKS_HERE


def run_world(world: World) -> int:
    """Start one run and stay with it to its end; return its exit code. What went wrong has been said then."""
    if world.prepared is None:
        assert world.refusal is not None
        say(f"muster: {world.refusal}")
        return world.refusal.exit_code
    return run_watched(world.prepared, CollectivesView(world.prepared.context.run))


def run_watched(prepared: Prepared, view: View) -> int:
    """Start a run, show it as it measures, and stay to its end; return its exit code, with all said that went wrong."""
    run, console = prepared.context.run, BenchConsole()
    try:
        with watching(view, console):
            return begin(prepared, console)
    except MusterError as error:
        say(f"muster: {error}")
        if run.path.is_dir():
            close(run, Outcome(error.exit_code, str(error)))
        return error.exit_code
    except KeyboardInterrupt:
        return exits.STOPPED


def has_rows(run: RunDir) -> bool:
    """Say whether a run has measured something."""
    files = [run.attempt(number).bench for number in run.attempt_numbers()]
    return any(Path(file).is_file() and file.stat().st_size for file in files)
