"""`muster save`: make a run save a checkpoint now and continue.

A user's program can save on request, too, once it has opened a session.

save.json is written → rank 0 reads it at its next log point → all ranks save → a `saved` row appears in the events
"""

import argparse
import json
import time
from typing import Any, Final

from muster.jobs.basics.errors import RefusedError, StartTimeoutError, StorageError, UsageError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import options
from muster.launch.common.fields import typed_line
from muster.launch.common.follow import LineFollower
from muster.launch.plan.submission import Submission
from muster.launch.records.runrows import read_rows
from muster.launch.records.runstate import DIRECT, RunState, read_state

POLL_S: Final = 0.1
PATIENCE_S: Final = 300.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `muster save`."""
    parser.epilog = "muster save RUN"
    options.add_run(parser)
    help_text = f"seconds to wait for the checkpoint (default: {PATIENCE_S:g})"
    parser.add_argument("--timeout", metavar="S", type=float, default=PATIENCE_S, help=help_text)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Request a checkpoint, wait for it, and print its step."""
    if not args.timeout > 0:
        raise UsageError(f"--timeout: must be more than 0 seconds, got {args.timeout:g}")
    folder = options.the_run(args)
    saved = save(folder, check(folder), args.timeout)
    record = {"run_id": folder.run_id, "step": saved.get("step"), "checkpoint": saved.get("checkpoint")}
    print(json.dumps(record) if args.json else f"{folder.run_id}: saved after step {saved.get('step')}")
    return 0


def check(run: RunDir) -> RunState:
    """Check that a run can save now, and return its state.

    Raises:
        RefusedError: if the job has no checkpoints, its program has opened no session, or the run has ended or has no
            supervisor.
    """
    state = read_state(run)
    if state.transport == DIRECT:
        asks = f"signal rank 0 yourself on {state.host}: kill -USR1 {state.pid}"
        how = asks if state.continue_with else "wait for the next scheduled checkpoint"
        raise RefusedError(f"{run.run_id}: was started directly and has no supervisor to ask; {how}")
    job = Submission.read(run).context.job
    if job.kind not in ("train", "command"):
        raise RefusedError(f"{run.run_id}: runs a {job.kind}: job, which has no checkpoints")
    if job.kind == "train" and job.checkpoint is None:
        raise RefusedError(
            f"{run.run_id}: its job has no checkpoint: section, so it saves nothing; add one and start a new run"
        )
    if state.is_over or state.state == "lost":
        raise RefusedError(
            f"{run.run_id}: is not running ({state.label}); {run.command('checkpoint list')} lists its checkpoints"
        )
    if job.kind == "command" and "session" not in read_rows(run).told:
        raise RefusedError(
            f"{run.run_id}: its program has opened no session (muster.session()), so Muster cannot save it; wait until "
            "it opens one, or let it save its own checkpoints"
        )
    return state


def save(run: RunDir, state: RunState, timeout_s: float) -> dict[str, Any]:
    """Request a checkpoint and return its `saved` row.

    Raises:
        RefusedError: if the run ends first.
        StorageError: if the save fails.
        StartTimeoutError: if the checkpoint is not written in time.
    """
    rows = LineFollower(run.events, offset=run.events.stat().st_size)
    run.ask_to_save("muster save")
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for row in map(typed_line, rows.poll()):
            match row.get("event"):
                case "saved" if row.get("step", 0) >= (state.step or 0):
                    return row
                case "missed" if row.get("missed"):
                    raise StorageError(f"{run.run_id}: the save failed: {row.get('message')}")
                case "ended":
                    raise RefusedError(f"{run.run_id}: ended before it saved: {row.get('message')}")
        time.sleep(POLL_S)
    at = "step, once its program calls steps() or save()" if state.kind == "command" else "log point (train.log_every)"
    raise StartTimeoutError(f"{run.run_id}: has not saved within {timeout_s:g} s; it saves at its next {at}")
