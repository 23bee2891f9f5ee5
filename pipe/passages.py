"""A micro-batch's way through a stage: a forward, and later its backward, in one of three ways.

    WholeGraph   forward: a graph of all layers            backward: through autograd at once
    Recomputed   forward: only the stage's input stays     backward: forward again, then as above
    Layerwise    forward: only layers' inputs stay         backward: layer by layer, one `autograd.grad` each

The second forward draws the same random numbers, reads buffers as the first one did (`pipe/buffers.py`) and leaves them
alone. All three add to `.grad` what a backward in one process would. What goes on to the next stage is detached; of an
output autograd keeps only what its operations saved, so memory is free once it has been sent.

A weight that several layers of a stage have gains one gradient a micro-batch, layer by layer too; but there its own
hooks (`Tensor.register_hook`) see each layer's share, and what belongs to no layer gains nothing.

Running statistics of batch norms are updated by every micro-batch in turn, and each is normalized by its own.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from muster.pipe.buffers import Before
from muster.pipe.draws import RandomState
from muster.pipe.splitting.layers import anchors_of
from muster.pipe.stage import Make, Stage

_run_backward: Final = Variable._execution_engine.run_backward


def _may_learn(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class WholeGraph:
    """A graph from the forward to the backward."""

    def __init__(self, stage: Stage, microbatch: int) -> None:
        self.stage, self.microbatch = stage, microbatch

    def forward(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run the stage, recorded by autograd."""
        return self._record(x, targets)

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Go back through the graph."""
        x, edge = self.x, self.edge
        del self.x, self.edge
        came: list[Tensor] = []
        if x.requires_grad:
            catch(x, came)
        # The engine itself, as `torch.autograd.backward` calls it: what that checks and fills in is known here.
        _run_backward((edge,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        return came.pop() if came else None

    def _record(self, x: Tensor, targets: Tensor | None) -> Tensor:
        output = self.stage.forward(x, self.microbatch, targets)
        self.learns = output.requires_grad
        if self.learns:
            # The edge, not the output: its memory is nobody's once it has been sent.
            self.x, self.edge = x, get_gradient_edge(output)
        return output.detach()


def catch(x: Tensor, came: list[Tensor]) -> None:
    """Take the gradient of a leaf as it comes: `.grad` may be a copy of other strides, by which sums go otherwise."""

    def take(gradients: tuple[Tensor, ...]) -> tuple[None]:
        came.append(gradients[0])
        return (None,)

    get_gradient_edge(x).node.register_prehook(take)


class Recomputed(WholeGraph):
    """An input that is forwarded again."""

    def forward(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run the stage, and keep its input only."""
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


class Layerwise:
    """The inputs of all layers: in the backward one layer's graph at a time."""

    def __init__(self, stage: Stage, microbatch: int) -> None:
        self.stage, self.microbatch = stage, microbatch

    def forward(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run layer after layer, and keep what each was given."""
        stage = self.stage
        self.targets, self.inputs, self.learning, self.random = targets, list[Tensor](), list[bool](), list[Any]()
        self.before = list[Before]()
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
        """Run and take back one layer after the other, last to first."""
        gains = Gains(self.stage.layers)
        of_x = self._backward(gradient, gains)
        gains.finish()
        return of_x

    def _backward(self, gradient: Tensor, gains: "Gains") -> Tensor | None:
        stage = self.stage
        for index in reversed(range(len(stage.layers))):
            x = self.inputs.pop().detach().requires_grad_(self.learning[index])
            with self.random.pop().as_it_was(), self.before.pop().as_they_were(), torch.enable_grad():
                output = self._run(index, x)
            if not output.requires_grad:
                return None
            of_x = self._through(index, output, x, gradient, gains)
            if of_x is None:  # a loop would not go on, either
                return None
            gradient = of_x
        return gradient

    def _forward(self, index: int, x: Tensor, *, is_new: bool) -> Tensor:
        """Run a layer whose input must stay as it is."""
        given = x.clone() if is_new else x
        version = given._version
        output = self._run(index, given)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"stage {self.stage.number}: layer {self.stage.names[index]!r} returned a {type(output).__name__}; "
                "layerwise, one tensor goes from layer to layer: put what belongs together into one layer, or leave "
                "layerwise out"
            )
        if given._version != version:
            if not is_new:
                raise self.stage.overwritten(index, layerwise=True)
            self.stage.overwrites[index] = True
        return output

    def _through(self, index: int, output: Tensor, x: Tensor, gradient: Tensor, gains: "Gains") -> Tensor | None:
        """Take one layer back; return the gradient of its input, None where none comes."""
        layer = self.stage.layers[index]
        parameters = [each for each in layer.parameters() if each.requires_grad]
        # A layer whose weights wait for the queue must be on the way to something that is asked for: its anchor.
        anchors = anchors_of(layer) if self.stage.splits else []
        wanted = [*parameters, *anchors, *([x] if x.requires_grad else [])]
        gradients = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
        for parameter, own in zip(parameters, gradients, strict=False):
            gains.add(parameter, own)
        return gradients[-1] if x.requires_grad else None

    def _run(self, index: int, x: Tensor) -> Tensor:
        stage = self.stage
        output = stage.layer(index, x.clone() if stage.overwrites[index] else x, self.microbatch)
        return stage.finish(output, self.targets) if index == len(stage.layers) - 1 else output


class Gains:
    """What parameters gain from all the layers of a stage that have them: one gradient, as autograd makes it."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        learning = [each for layer in layers for each in layer.parameters() if each.requires_grad]
        self._uses = Counter(map(id, learning))  # layers still to come, by parameter
        self._partial: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def add(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Add what comes of one layer; None where nothing does."""
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
        """Add what waits for layers that no gradient has reached."""
        for parameter, gradient in self._partial.values():
            accumulate(parameter, gradient)


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add to `.grad` as autograd's own accumulation does, with its hooks."""
    with torch.no_grad():
        held = parameter.grad
        if held is None:  # a copy: autograd may give one tensor to several parameters, and to the input
            parameter.grad = gradient.clone()
        elif held.is_sparse and not gradient.is_sparse:
            parameter.grad = _sum(held, gradient)
        else:
            held += gradient
    hooks: Any = parameter._post_accumulate_grad_hooks
    for hook in (hooks or {}).values():
        hook(parameter)


def _sum(one: Tensor, other: Tensor) -> Tensor:
    """Add two gradients; torch wants the sparse one behind."""
    return other + one if one.is_sparse and not other.is_sparse else one + other


PASSAGES: Final[dict[str, Make]] = {
    "whole": WholeGraph,
    "recompute": Recomputed,
    "layerwise": Layerwise,
}
