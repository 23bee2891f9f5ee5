"""Settings whose steps cannot be recorded as CUDA graphs. `cuda_graph: true` refuses them; `auto` runs them eagerly.

    cuda_graph   on a GPU, recordable     on a GPU, otherwise       on a CPU
    false        eager                    eager                     eager
    auto         recorded                 eager, with the reason    eager
    true         recorded                 refused                   refused

Data-parallel modes record a whole step (`jobs/train/graph.py`); pipelines record each forward and each backward of a
stage (`pipe/graphs.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from muster.jobs.spec.rules import TrainRules

AUTO: Final = "auto"
IN_PLACE: Final = ("bucketed", "overlap", "flat")  # syncs whose averaging needs no hooks

# Modes whose step cannot be recorded, with the work that the host has to do while the step runs.
THROUGH_THE_HOST: Final = {
    "gather_scatter": "the host starts the messages with which rank 0 gathers gradients",
    "ddp": "PyTorch's wrapper decides on the host which bucket is ready",
    "zero3": "the host allocates and frees the memory of parameters within a step",
    "fsdp": "the host allocates and frees the memory of parameters within a step",
    "terapipe": "the host cuts micro-batches into slices of tokens",
}


@dataclass(frozen=True)
class Unrecordable:
    """One row: a test of settings, a phrase that names them, the reason, and the remedy. All are format strings."""

    found: Callable[[TrainRules], bool]
    what: str
    why: str
    remedy: str = "set cuda_graph: false"


def _has_copies(s: TrainRules) -> bool:
    return s.parallel is not None and s.parallel.data > 1


UNRECORDABLE: Final = (
    Unrecordable(lambda s: s.mode_name in THROUGH_THE_HOST, "{mode}", "{host}", "choose mode bucketed"),
    Unrecordable(
        lambda s: s.optimizer.make is not None,
        "optimizer {s.optimizer.make}",
        "its step may need the host",
    ),
    Unrecordable(
        lambda s: s.is_pipeline and s.splits_layers,
        "tensor parallel within a pipeline",
        "the graphs of different micro-batches would have to exchange activations in one order on all ranks",
    ),
    Unrecordable(
        lambda s: s.is_pipeline and _has_copies(s) and s.sync not in IN_PLACE,
        "data-parallel pipelines, unless gradients are averaged in place",
        "hooks copy the gradients into messages, and a recorded backward calls no hooks",
        "set cuda_graph: false, or sync: bucketed",
    ),
    Unrecordable(
        lambda s: s.is_pipeline and s.activation_checkpointing,
        "activation_checkpointing",
        "a recorded graph keeps its memory, so activation_checkpointing saves nothing",
        "remove one of them",
    ),
    Unrecordable(
        lambda s: s.is_pipeline and s.exact and s.model.ties_head,
        "exact if the head and the embedding share their weight",
        "hooks collect their gradients, and a recorded backward calls no hooks",
        "write model: {{name: ..., tied: false}}, or remove cuda_graph or exact",
    ),
)


def unrecordable(settings: TrainRules) -> Unrecordable | None:
    """Return the first reason why these settings cannot be recorded, with its words filled in, or None."""
    row = next((row for row in UNRECORDABLE if row.found(settings)), None)
    if row is None:
        return None
    mode = settings.mode_name
    words = {"s": settings, "mode": mode, "host": THROUGH_THE_HOST.get(mode)}
    return Unrecordable(row.found, *(text.format(**words) for text in (row.what, row.why, row.remedy)))


def records(settings: TrainRules, device: str) -> bool:
    """Return whether a rank on a device ("cuda" or "cpu") records its steps."""
    if settings.cuda_graph != AUTO:
        return bool(settings.cuda_graph)
    return device == "cuda" and not why_eager(settings)


def why_eager(settings: TrainRules) -> str:
    """Return the reason why `cuda_graph: auto` runs eagerly with these settings on a GPU; empty if it records.

    The user's model and loss run eagerly unless the job says `cuda_graph: true`, because a replay repeats kernels, but
    calls no Python: no hooks, counters or branches.
    """
    if (row := unrecordable(settings)) is not None:
        return f"{row.what}: {row.why}"
    own = next((key for key in ("train.model.make", "train.loss") if key in settings.makes), None)
    if own is not None:
        return f"{own} names your own code, whose Python a replay would skip; cuda_graph: true records it all the same"
    return ""
