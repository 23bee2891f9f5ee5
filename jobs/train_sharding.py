"""What of a `train:` section does not go with state that ranks share out (modes zero1, zero2, zero3, fsdp), and why."""

from typing import TYPE_CHECKING

from jobs.modes import SHARDED

if TYPE_CHECKING:
    from jobs.train_settings import TrainSettings


def why_not_sharded(settings: "TrainSettings") -> str | None:
    """Return why these settings cannot be trained with shared-out state, and what to do; None when they can.

    A setting that a mode does not read is no reason: a run may go on in another mode.
    """
    mode = settings.mode_name
    if mode not in SHARDED:
        return None
    if settings.exact and settings.accumulate == "sharded" and settings.grad_accumulation > 1:
        return (
            "accumulate: sharded adds micro-batches after they are summed over ranks, exact: true before; "
            "set accumulate: local, or grad_accumulation: 1"
        )
    if settings.layerwise and mode == "zero3":
        return _why_not_layerwise(settings)
    return None


def _why_not_layerwise(settings: "TrainSettings") -> str | None:
    for key, wanted in (("exact", False), ("compile", False), ("activation_checkpointing", False)):
        if getattr(settings, key) is not wanted:
            return f"layerwise runs every layer by itself, without {key}; set {key}: false, or layerwise: false"
    return None
