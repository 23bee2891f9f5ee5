"""A micro-batch pass: one micro-batch's forward through a stage and its later backward, in one of three ways.

    WholeGraphPass   forward: builds one autograd graph        backward: through that graph
    RecomputedPass   forward: keeps only the stage's input     backward: forward again, then as above
    LayerwisePass    forward: keeps only the layers' inputs    backward: layer by layer, one `autograd.grad` each

The second forward draws the same random numbers and reads the same buffer values as the first one, and leaves the
buffers unchanged (`pipe/buffers.py`). All three passes add to `.grad` exactly the gradients of a backward in one
process. The tensor passed to the next stage is detached, so its memory is free once it has been sent, unless an
operation saved it for the backward.

In all three, a weight shared by several layers of a stage gets one gradient per micro-batch. With LayerwisePass, hooks
on such a weight (`Tensor.register_hook`) are called with each layer's contribution, and parameters outside the layers
get no gradient.

Batch norms normalize each micro-batch by its own statistics, and update their running statistics after each.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from muster.pipe.buffers import BufferSnapshot
from muster.pipe.rng_streams import RandomState
from muster.pipe.splitting.layers import anchors_of
from muster.pipe.stage import Make, Stage

_run_backward: Final = Variable._execution_engine.run_backward


def _may_learn(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


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
        self.learns = learning and _may_learn(output)
        return output

    def backward(self, gradient: Tensor) -> Tensor | None:
        given, targets = self.given, self.targets
        del self.given, self.targets
        with self.random.as_it_was(), self.before.as_they_were(), torch.enable_grad():
            self._record(given, targets)
        del self.before
        return super().backward(gradient) if self.learns else None


class LayerwisePass:
    """A pass that keeps the inputs of all layers. Its backward builds the graph of one layer at a time."""

    def __init__(self, stage: Stage, microbatch: int) -> None:
        self.stage, self.microbatch = stage, microbatch

    def forward(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run layer after layer; keep the input of each."""
        stage = self.stage
        self.targets, self.inputs, self.learning, self.random = targets, list[Tensor](), list[bool](), list[Any]()
        self.before = list[BufferSnapshot]()
        learns, is_new = x.requires_grad, stage.is_new()
        stage.announce(self.microbatch)
        with torch.no_grad():
            for index, layer in enumerate(stage.layers):
                self.inputs.append(x)
                self.learning.append(learns)
                self.random.append(RandomState(x, stage.hooks))
                self.before.append(stage.buffers_of[index].before())
                x = self._forward(index, x, is_new=is_new)
                self.before[-1].after()
                learns = (learns or any(each.requires_grad for each in layer.parameters())) and _may_learn(x)
        self.learns = learns
        return x

    def backward(self, gradient: Tensor) -> Tensor | None:
        """For each layer, last to first, run its forward again, then its backward."""
        sums = GradientSums(self.stage.layers)
        of_x = self._backward(gradient, sums)
        sums.finish()
        return of_x

    def _backward(self, gradient: Tensor, sums: "GradientSums") -> Tensor | None:
        stage = self.stage
        for index in reversed(range(len(stage.layers))):
            x = self.inputs.pop().detach().requires_grad_(self.learning[index])
            with self.random.pop().as_it_was(), self.before.pop().as_they_were(), torch.enable_grad():
                output = self._run(index, x)
            if not output.requires_grad:
                return None
            of_x = self._layer_backward(index, output, x, gradient, sums)
            if of_x is None:  # no gradient reaches earlier layers
                return None
            gradient = of_x
        return gradient

    def _forward(self, index: int, x: Tensor, *, is_new: bool) -> Tensor:
        """Run a layer, and detect whether it overwrites its input."""
        given = x.clone() if is_new else x
        version = given._version
        output = self._run(index, given)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"stage {self.stage.number}: layer {self.stage.names[index]!r} returned a {type(output).__name__}; "
                "with layerwise, one tensor is passed from layer to layer; combine layers that exchange several values "
                "into one, or omit layerwise"
            )
        if given._version != version:
            if not is_new:
                raise self.stage.overwritten(index, layerwise=True)
            self.stage.overwrites[index] = True
        return output

    def _layer_backward(
        self, index: int, output: Tensor, x: Tensor, gradient: Tensor, sums: "GradientSums"
    ) -> Tensor | None:
        """Run the backward of one layer; return the gradient of its input, or None if there is none."""
        layer = self.stage.layers[index]
        parameters = [each for each in layer.parameters() if each.requires_grad]
        # If the queue computes a layer's weight gradients, autograd reaches the layer only through its anchor.
        anchors = anchors_of(layer) if self.stage.splits else []
        wanted = [*parameters, *anchors, *([x] if x.requires_grad else [])]
        gradients = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
        for parameter, own in zip(parameters, gradients, strict=False):
            sums.add(parameter, own)
        return gradients[-1] if x.requires_grad else None

    def _run(self, index: int, x: Tensor) -> Tensor:
        stage = self.stage
        output = stage.layer(index, x.clone() if stage.overwrites[index] else x, self.microbatch)
        return stage.finish(output, self.targets) if index == len(stage.layers) - 1 else output


class GradientSums:
    """The sums of the gradients that a stage's layers contribute to each parameter, added as in one autograd graph."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        learning = [each for layer in layers for each in layer.parameters() if each.requires_grad]
        self._uses = Counter(map(id, learning))  # number of layers that have not contributed yet, by parameter
        self._partial: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def add(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Add one layer's contribution, which is None if the layer has none."""
        place = id(parameter)
        self._uses[place] -= 1
        if place in self._partial:
            _, before = self._partial.pop(place)
            gradient = before if gradient is None else _sum(before, gradient)
        if gradient is None:
            return
        if self._uses[place]:
            self._partial[place] = parameter, gradient
        else:
            accumulate(parameter, gradient)

    def finish(self) -> None:
        """Add the remaining sums to `.grad`; they are incomplete because the backward ended before the first layer."""
        for parameter, gradient in self._partial.values():
            accumulate(parameter, gradient)


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add to `.grad` as autograd does, and call the parameter's hooks."""
    with torch.no_grad():
        held = parameter.grad
        if held is None:  # a copy, because autograd may return one tensor as several gradients
            parameter.grad = gradient.clone()
        elif held.is_sparse and not gradient.is_sparse:
            parameter.grad = _sum(held, gradient)
        else:
            held += gradient
    hooks: Any = parameter._post_accumulate_grad_hooks
    for hook in (hooks or {}).values():
        hook(parameter)


def _sum(one: Tensor, other: Tensor) -> Tensor:
    """Add two gradients. If only one is sparse, it must be the second operand of torch's addition."""
    return other + one if one.is_sparse and not other.is_sparse else one + other


PASSES: Final[dict[str, Make]] = {
    "whole": WholeGraphPass,
    "recompute": RecomputedPass,
    "layerwise": LayerwisePass,
}
