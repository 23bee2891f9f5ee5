"""A batch on its way into micro-batches: what no step can be made of, what all ranks must agree on, how it is cut."""

import zlib

import torch
from torch import Tensor

from muster.pipe.rows import part_lengths
from muster.pipe.run import Parts
from muster.pipe.wires.meeting import Meeting


def cut_batch(
    inputs: Tensor, targets: Tensor | None, most: int, meeting: Meeting | None, *, evaluates: bool = False
) -> Parts:
    """Cut a batch into `most` micro-batches, fewer where there are fewer samples; all ranks must have such a one.

    Raises:
        TypeError: inputs or targets are no tensors.
        ValueError: no samples, inputs and targets of different numbers, inputs that require a gradient, or a batch of
            another shape than another rank's.
        RuntimeError: autograd records nothing here.
    """
    _check(inputs, targets, evaluates=evaluates)
    lengths = part_lengths(len(inputs), most)
    kind = (tuple(inputs.shape[1:]), inputs.dtype, evaluates)
    if meeting is not None:
        in_words = f"{len(inputs)} samples of shape {kind[0]}, {inputs.dtype}"
        meeting.compare([len(inputs), zlib.crc32(repr(kind).encode())], in_words)
    return Parts(
        torch.split(inputs, lengths),
        () if targets is None else torch.split(targets, lengths),
        [length / len(inputs) for length in lengths],
        [(length, *kind) for length in lengths],
    )


def _check(inputs: Tensor, targets: Tensor | None, *, evaluates: bool) -> None:
    """Refuse what no step can be made of."""
    for what, each in (("inputs", inputs), ("targets", inputs if evaluates else targets)):
        if not isinstance(each, Tensor):
            raise TypeError(f"{what} are a {type(each).__name__}, wanted one tensor, samples first")
    if not inputs.dim() or not len(inputs):
        raise ValueError("a batch of 0 samples; pass one at least")
    if targets is not None and len(targets) != len(inputs):
        raise ValueError(f"{len(inputs)} inputs but {len(targets)} targets; pass one for each")
    if inputs.requires_grad:
        raise ValueError("inputs require a gradient, which would reach no rank's; pass inputs.detach()")
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "a pipeline within torch.inference_mode(): call it outside; evaluate() records nothing anyway"
        )
