"""What of a `train:` section does not go with state that ranks share out (modes zero1, zero2, zero3, fsdp), and why."""

from typing import TYPE_CHECKING

from muster.jobs.spec.modes import SHARDED

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


def why_not_sharded(settings: "TrainSettings") -> str | None:
    """Return why these settings cannot be trained with shared-out state, and what to do; None when they can.

    A setting that a mode does not read is no reason: a run may go on in another mode.
    """
    mode = settings.mode_name
    if mode not in SHARDED:
        return None
    if settings.exact and settings.accumulate == "sharded" and mode != "fsdp":
        return (
            "accumulate: sharded sums every micro-batch over ranks, exact: true adds up on each rank first; "
            "set accumulate: local, or exact: false"
        )
    if settings.layerwise and mode == "zero3":
        return _why_not_layerwise(settings)
    return None


def _why_not_layerwise(settings: "TrainSettings") -> str | None:
    asked = {key: getattr(settings, key) for key in ("exact", "compile", "activation_checkpointing")}
    for key in (key for key, on in asked.items() if on):
        return f"layerwise runs every layer by itself, without {key}; set {key}: false, or layerwise: false"
    if settings.communication_dtype is not None:
        return "layerwise sends gradients as they are; remove communication_dtype, or set layerwise: false"
    if not settings.model.is_vgg and settings.model.tied:
        return (
            "layerwise frees every layer by itself, and this model's head is its embedding; "
            "write model: {name: ..., tied: false}, or set layerwise: false"
        )
    return None
