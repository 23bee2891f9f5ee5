"""Stop a sweep: stop.json in its folder prevents further points from starting, then each run is stopped."""

from dataclasses import replace
from pathlib import Path

from muster.jobs.runfolder.rundir import RunDir
from muster.launch.records.runstate import read_state
from muster.launch.scheduler.held_signals import request_stop
from muster.launch.submit.stopping import StopOutcome, stop
from muster.launch.sweeps.sweep import SweepRecord


def stop_sweep(folder: Path, *, grace_s: float | None, now: bool) -> list[StopOutcome]:
    """Stop the runs of a sweep, and the process that starts them. Errors as for `stop`."""
    record = SweepRecord.read(folder)
    request_stop(RunDir(folder), grace_s, now=now)
    existing = [run for run in record.runs(folder) if run.path.is_dir()]
    runs = [run for run in existing if run.events.exists()]
    for run in existing:
        if run not in runs:
            request_stop(run, grace_s, now=now)  # if the run begins now, its supervisor stops it at once
    over = {run for run in runs if read_state(run).is_over}
    queued = [run for run in runs if run not in over and run.slurm.exists()]
    if queued:  # cancel all together, because each may need time to save
        from muster.launch.scheduler.slurm_follow import cancel

        cancel(queued, grace_s=0.0 if now else grace_s, now=now)
    outcomes = [stop(run, grace_s=grace_s, now=now) for run in runs]
    return [replace(each, was_over=run in over) for run, each in zip(runs, outcomes, strict=True)]
