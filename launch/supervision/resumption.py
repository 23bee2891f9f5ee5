"""From which checkpoint an attempt goes on: the supervisor chooses and verifies, so that all ranks get the same one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from muster.jobs.basics.errors import NoCheckpointError
from muster.jobs.checkpoint.choose import newest_good
from muster.launch.plan.plan import Context

TRAIN = "train"


def saves(context: Context) -> bool:
    """Say whether the job makes checkpoints; a program makes some if it opens a session, which nobody knows before."""
    return context.entry is None or (context.job.kind == TRAIN and context.job.checkpoint is not None)


def continues(context: Context, *, session: bool) -> bool:
    """Say whether the run goes on after the time limit of its allocation: from a checkpoint, or as it knows itself.

    `session`: a program of it has opened a session.
    """
    if context.entry is None:
        return session or context.job.restart is not None
    return saves(context)


def with_checkpoint(context: Context, say: Callable[[str], None]) -> Context:
    """Return what the next attempt's ranks are told: the newest good checkpoint of the run, verified; None at first.

    It reads every byte of the checkpoint: call it beside the loop.

    Raises:
        NoCheckpointError: there were checkpoints, and none of them can be used any more; or not the one asked for.
    """
    if not saves(context):
        return context
    run = context.run
    wanted: Any = context.options.get("from") if context.options.get("from_attempt") == context.attempt else None
    asked = {} if wanted is None else {"step": wanted} if isinstance(wanted, int) else {"name": wanted}
    chosen = newest_good(run, say=say, **asked)
    if chosen is None and run.checkpoints.is_dir() and any(run.checkpoints.glob("bad-*")):
        raise NoCheckpointError(
            f"{run.checkpoints}: every checkpoint was found broken (bad-*), none is left to go on from; "
            f"{run.command('checkpoint list')} shows why; start the job anew with muster run"
        )
    resume = None
    if chosen is not None:
        resume = {
            "checkpoint": chosen.folder.name,
            "step": chosen.manifest.step,
            "sha256": chosen.manifest.sha256,
        }
    options = {name: value for name, value in context.options.items() if name not in ("from", "from_attempt")}
    return replace(context, options={**options, "saving": True, "resume": resume})
