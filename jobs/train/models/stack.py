"""A model as a stack of named layers. It returns logits, or the mean loss if it is called with targets.

    body                                     head
    embed | block1 | block2 | ... | norm     head     gpt
    conv1 norm1 relu1 pool1 | conv2 ...      head     vgg

The loss is computed within `forward`, so that data-parallel wrappers see the whole forward of a step. In training, the
body can run in pieces that are compiled or recomputed in the backward, and head and loss can be compiled or computed in
chunks (`jobs/train/numerics/`). Evaluation runs the plain layers.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from muster.jobs.basics.errors import RefusedError
from muster.jobs.models.shapes import GptShape, VggShape

Layers = Sequence[nn.Module]
Loss = Callable[[Tensor, Tensor], Tensor]


def in_turn(layers: Layers, x: Tensor) -> Tensor:
    """Run layers one after the other."""
    for layer in layers:
        x = layer(x)
    return x


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (..., classes) against targets (...), computed in at least float32.

    Raises:
        RefusedError: if the model's outputs are something other than logits.
    """
    if not isinstance(logits, Tensor):
        raise RefusedError(
            "train.loss: the default loss needs a tensor of logits, but the outputs are of type "
            f"{type(logits).__name__}; set train.loss to a function of these outputs and the targets"
        )
    flat = logits.flatten(0, -2)  # (predictions, classes)
    return functional.cross_entropy(flat.to(torch.promote_types(flat.dtype, torch.float32)), targets.flatten())


def plain_loss(head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the head's output for `x`."""
    return mean_loss(head(x), targets)


def head_loss(loss: Loss, head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """Return the given loss of the head's output for `x`."""
    return loss(head(x), targets)


class LayerStack(nn.Sequential):
    """Named layers in order. Pipeline stages are slices of them. The last layer computes the logits."""

    shape: VggShape | GptShape | None = None  # of Muster's own models
    run_body: Callable[[Layers, Tensor], Tensor] = staticmethod(in_turn)
    run_loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = staticmethod(plain_loss)

    def forward(self, input: Tensor, targets: Tensor | None = None) -> Tensor:
        """Map inputs to logits, or with targets to the mean loss."""
        *body, head = self
        x = self.run_body(body, input) if self.training else in_turn(body, input)
        return cast(Tensor, head(x)) if targets is None else self.run_loss(head, x, targets)
