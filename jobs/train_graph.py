"""What of a `train:` section cannot be in a CUDA graph, and why: whatever the host decides within a step."""

from typing import TYPE_CHECKING, Final

from jobs.modes import PIPELINES

if TYPE_CHECKING:
    from jobs.train_settings import TrainSettings

THROUGH_THE_HOST: Final = {
    "gather_scatter": "rank 0 gathers by messages that the host starts",
    "ddp": "PyTorch's wrapper decides in the host which bucket is ready",
    "zero1": "its optimizer and its gathers are started by the host",
    "zero2": "its optimizer and its gathers are started by the host",
    "zero3": "the host takes and gives back the memory of parameters within a step",
    "fsdp": "the host takes and gives back the memory of parameters within a step",
    **dict.fromkeys(PIPELINES, "stages hand on micro-batches by messages that the host starts"),
}


def why_not_recorded(settings: "TrainSettings") -> str | None:
    """Return why a step of these settings cannot be one CUDA graph, and what to do; None when it can."""
    if settings.device == "cpu":
        return "cuda_graph needs a CUDA device, device is cpu; remove one of them"
    if (mode := settings.mode_name) in THROUGH_THE_HOST:
        return f"cuda_graph does not go with {mode}: {THROUGH_THE_HOST[mode]}; choose mode bucketed"
    if settings.model.dropout > 0.0:
        return "cuda_graph does not go with dropout: the host seeds every micro-batch anew; set dropout: 0"
    if settings.exact:
        return "cuda_graph does not go with exact: the host keeps virtual ranks apart; remove one of them"
    return None
