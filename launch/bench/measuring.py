"""Execution of a measurement: one run after another, a live display of each, and one result that joins them all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.jobs.basics import exits
from muster.jobs.basics.errors import MusterError, UsageError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.bench import results
from muster.launch.bench.choices import Output
from muster.launch.bench.report import say
from muster.launch.bench.watching import BenchConsole, View, watching
from muster.launch.scheduler.held_signals import ended_by_signal
from muster.launch.scheduler.slurm_run import close
from muster.launch.submit.prepare import PreparedSubmission
from muster.launch.submit.request import Request
from muster.launch.submit.start import begin
from muster.slurm.states import JobOutcome


@dataclass(frozen=True)
class PreparedWorld:
    """One prepared run, or the error that refused it."""

    label: str
    prepared: PreparedSubmission | None
    refusal: MusterError | None = None


def check(request: Request, output: Output) -> None:
    """Check a request before anything starts.

    Raises:
        UsageError: if the ranks would be started by hand, or an output file cannot be written.
    """
    if request.on == "hand":
        raise UsageError(
            "--on hand: muster bench starts its runs itself; write a job file, start it with muster cmd JOB.yaml, "
            "and print the result with muster bench show RUN"
        )
    output.check()


def measure(worlds: Sequence[PreparedWorld], view_of: Callable[[RunDir], View], output: Output) -> int:
    """Run every world, then print and write the result; return the first nonzero exit code, or 1 for a bad result."""
    codes, runs, unmeasured = [], [], []
    for number, world in enumerate(worlds, 1):
        if len(worlds) > 1:
            say(f"[{number}/{len(worlds)}] {world.label}")
        codes.append(run_world(world, view_of))
        run = world.prepared.context.run if world.prepared is not None else None
        if run is not None and has_rows(run):
            runs.append(run.path)
        else:
            unmeasured.append(world.label)
        if codes[-1] == exits.STOPPED or (run is not None and ended_by_signal(run)):
            unmeasured += [each.label for each in worlds[number:]]
            break
    code = next((code for code in codes if code), 0)
    if not runs:
        return code or 1
    if output.json and unmeasured:
        say(f"muster: not measured: {'; '.join(unmeasured)}")
    bad = results.of_paths(runs, unmeasured).deliver(output)
    return code or bad


def run_world(world: PreparedWorld, view_of: Callable[[RunDir], View]) -> int:
    """Run one world until it ends; print its errors and return its exit code."""
    if world.prepared is None:
        assert world.refusal is not None
        say(f"muster: {world.refusal}")
        return world.refusal.exit_code
    return run_watched(world.prepared, view_of(world.prepared.context.run))


def run_watched(prepared: PreparedSubmission, view: View) -> int:
    """Start a run and show it until it ends; print its errors and return its exit code."""
    run, console = prepared.context.run, BenchConsole()
    try:
        with watching(view, console):
            return begin(prepared, console)
    except MusterError as error:
        say(f"muster: {error}")
        if run.path.is_dir():
            close(run, JobOutcome(error.exit_code, str(error)))
        return error.exit_code
    except KeyboardInterrupt:
        return exits.STOPPED


def has_rows(run: RunDir) -> bool:
    """Return whether a run has measured anything."""
    files = [run.attempt(number).bench for number in run.attempt_numbers()]
    return any(Path(file).is_file() and file.stat().st_size for file in files)
