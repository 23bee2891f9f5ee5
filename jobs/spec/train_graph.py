"""What of a `train:` section cannot be in a CUDA graph, and why: whatever the host decides while it is replayed.

Data-parallel modes record a whole step, pipelines each forward and backward of a stage (`pipe/graphs.py`).
"""

from typing import TYPE_CHECKING, Final

from muster.jobs.spec.modes import PIPELINES

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings

THROUGH_THE_HOST: Final = {
    "gather_scatter": "rank 0 gathers by messages that the host starts",
    "ddp": "PyTorch's wrapper decides in the host which bucket is ready",
    "zero1": "its optimizer and its gathers are started by the host",
    "zero2": "its optimizer and its gathers are started by the host",
    "zero3": "the host takes and gives back the memory of parameters within a step",
    "tensor": "exchanges within its layers have not been recorded yet",
    "fsdp": "the host takes and gives back the memory of parameters within a step",
}


def why_not_recorded(settings: "TrainSettings") -> str | None:
    """Return why a step of these settings cannot be one CUDA graph, and what to do; None when it can."""
    if settings.device == "cpu":
        return "cuda_graph needs a CUDA device, device is cpu; remove one of them"
    if (mode := settings.mode_name) in THROUGH_THE_HOST:
        return f"cuda_graph does not go with {mode}: {THROUGH_THE_HOST[mode]}; choose mode bucketed"
    if settings.model.dropout > 0.0:
        return "cuda_graph does not go with dropout: the host seeds every micro-batch anew; set dropout: 0"
    if mode in PIPELINES:
        return _why_no_action(settings)
    if settings.exact:
        return "cuda_graph does not go with exact: the host keeps virtual ranks apart; remove one of them"
    return None


def _why_no_action(settings: "TrainSettings") -> str | None:
    """Return why the forwards and backwards of a pipeline cannot be graphs."""
    split = settings.parallel
    if split is not None and split.tensor > 1:
        return (
            "cuda_graph does not go with tensor parallel: exchanges within layers have not been recorded yet; "
            "set cuda_graph: false"
        )
    if split is not None and split.data > 1:
        return (
            f"cuda_graph does not go with {split.data} data-parallel pipelines: gradients are averaged by hooks, "
            "which a recorded backward does not call; set cuda_graph: false"
        )
    for key in ("activation_checkpointing", "layerwise"):
        if getattr(settings, key):
            return f"cuda_graph does not go with {key}: what is recorded keeps its memory anyway; remove one of them"
    if settings.exact and settings.model.tied and not settings.model.is_vgg:
        return (
            "cuda_graph does not go with exact where the head is the embedding: its gradients are heard of by hooks, "
            "which a recorded backward does not call; write model: {name: ..., tied: false}, or remove one of them"
        )
    return None
