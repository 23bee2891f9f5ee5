"""Choose the checkpoint for the next attempt. The supervisor verifies it once, so that all ranks load the same one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from muster.jobs.basics.errors import NoCheckpointError
from muster.jobs.checkpoint.choose import newest_good
from muster.launch.plan.plan import Context

TRAIN = "train"


def saves(context: Context) -> bool:
    """Return whether the job may make checkpoints; True for a user's program, because it can open a session."""
    return context.entry is None or (context.job.kind == TRAIN and context.job.checkpoint is not None)


def continues(context: Context, *, session: bool) -> bool:
    """Return whether the run can continue in another allocation: from a checkpoint, or because its job has `restart:`.

    `session`: the program has opened a session.
    """
    if context.entry is None:
        return session or context.job.restart is not None
    return saves(context)


def with_checkpoint(context: Context, say: Callable[[str], None]) -> Context:
    """Return the context of the next attempt. Its option `resume` is the newest good checkpoint, verified, or None.

    This reads every byte of the checkpoint, so call it outside the event loop.

    Raises:
        NoCheckpointError: if every checkpoint is broken, or the requested one cannot be used.
    """
    if not saves(context):
        return context
    run = context.run
    wanted: Any = context.options.get("from") if context.options.get("from_attempt") == context.attempt else None
    asked = {} if wanted is None else {"step": wanted} if isinstance(wanted, int) else {"name": wanted}
    chosen = newest_good(run, say=say, **asked)
    if chosen is None and run.checkpoints.is_dir() and any(run.checkpoints.glob("bad-*")):
        raise NoCheckpointError(
            f"{run.checkpoints}: every checkpoint is broken (bad-*), so the run cannot continue; "
            f"{run.command('checkpoint list')} shows why; start a new run with muster run"
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
