"""A micro-batch pass: one micro-batch's forward through a stage and its later backward, in one of two ways.

    WholeGraphPass   forward: builds one autograd graph        backward: through that graph
    RecomputedPass   forward: keeps only the stage's input     backward: forward again, then as above

The second forward draws the same random numbers and reads the same buffer values as the first one, and leaves the
buffers unchanged (`pipe/buffers.py`). Both passes add to `.grad` exactly the gradients of a backward in one process. A
weight shared by several layers of a stage gets one gradient per micro-batch. The tensor passed to the next stage is
detached, so its memory is free once it has been sent, unless an operation saved it for the backward.

Batch norms normalize each micro-batch by its own statistics, and update their running statistics after each.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from muster.pipe.rng_streams import RandomState
from muster.pipe.stage import Stage

_run_backward: Final = Variable._execution_engine.run_backward


class WholeGraphPass:
    """A pass that keeps its autograd graph from the forward to the backward."""

    def __init__(self, stage: Stage, microbatch: int) -> None:
        self.stage, self.microbatch = stage, microbatch

    def forward(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run the stage; autograd records it."""
        return self._record(x, targets)

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Run the backward through the recorded graph."""
        return self.through([(self.edge, gradient)])

    def through(self, roots: Sequence[tuple[GradientEdge, Tensor]]) -> Tensor | None:
        """Run the backward from edges of the recorded graph, with one gradient per edge."""
        x = self.x
        del self.x, self.edge
        captured: list[Tensor] = []
        if x.requires_grad:
            capture_gradient(x, captured)
        # Call the engine directly, as `torch.autograd.backward` does, but without its checks and defaults.
        edges, gradients = zip(*roots, strict=True)
        _run_backward(edges, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)
        return captured.pop() if captured else None

    def _record(self, x: Tensor, targets: Tensor | None) -> Tensor:
        output = self.stage.forward(x, self.microbatch, targets)
        self.learns = output.requires_grad
        if self.learns:
            # Keep only the edge, so that the memory of the output is free once it has been sent.
            self.x, self.edge = x, get_gradient_edge(output)
        return output.detach()


def capture_gradient(x: Tensor, captured: list[Tensor]) -> None:
    """Append the gradient of a leaf to `captured`, with the strides that autograd gave it.

    `.grad` could be a copy with other strides, whose sums round differently.
    """

    def take(gradients: tuple[Tensor, ...]) -> tuple[None]:
        captured.append(gradients[0])
        return (None,)

    get_gradient_edge(x).node.register_prehook(take)


class RecomputedPass(WholeGraphPass):
    """A pass that keeps only the stage's input, and runs the forward again in the backward."""

    def forward(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run the stage; keep only its input."""
        self.given, self.targets, self.random = x, targets, RandomState(x, self.stage.hooks)
        self.before = self.stage.buffers.before()
        with torch.no_grad():
            output = self.stage.forward(x, self.microbatch, targets)
        self.before.after()
        learning = x.requires_grad or bool(self.stage.learning)
        self.learns = learning and (output.is_floating_point() or output.is_complex())
        return output

    def backward(self, gradient: Tensor) -> Tensor | None:
        given, targets = self.given, self.targets
        del self.given, self.targets
        with self.random.as_it_was(), self.before.as_they_were(), torch.enable_grad():
            self._record(given, targets)
        del self.before
        return super().backward(gradient) if self.learns else None
