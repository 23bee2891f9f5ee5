"""One stage's work for one micro-batch: a forward, and later its backward, in one of three ways.

    WholeGraph   forward: a graph of all layers            backward: through autograd at once
    Recomputed   forward: only the stage's input stays     backward: forward again, then as above
    Layerwise    forward: only layers' inputs stay         backward: layer by layer, one `autograd.grad` each

The second forward draws the same random numbers and leaves running statistics and other buffers alone. All three add
to `.grad` what a backward in one process would. What goes on to the next stage is detached; of an output autograd keeps
only what its operations saved, so memory is free once it has been sent.

Running statistics of batch norms are updated by every micro-batch in turn, and each is normalized by its own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.batchnorm import _NormBase

from pipe.draws import Hooks, RandomState

Loss = Callable[[Tensor, Tensor], Tensor]


class Stage:
    """Layers of a model that one rank runs one after the other; the last stage's end in the loss."""

    def __init__(
        self, number: int, begin: int, layers: Sequence[tuple[str, nn.Module]], hooks: Hooks, *, splits: bool
    ) -> None:
        self.number, self.begin = number, begin
        self.splits = splits  # a backward leaves weights to a queue
        self.names = [name for name, _ in layers]
        self.layers = [layer for _, layer in layers]
        self.hooks = hooks
        self.loss: Loss | None = None
        self._parameters = [part._parameters for layer in self.layers for part in layer.modules()]
        # What comes from another stage is not ours to overwrite.
        self.overwrites = [any(getattr(part, "inplace", False) for part in layer.modules()) for layer in self.layers]

    @property
    def learning(self) -> list[nn.Parameter]:
        """List the parameters that learn, each once."""
        held = (each for own in self._parameters for each in own.values() if each is not None and each.requires_grad)
        return list({id(each): each for each in held}.values())

    def forward(self, x: Tensor, microbatch: int, targets: Tensor | None = None) -> Tensor:
        """Run all layers, and the loss where there are targets.

        Raises:
            TypeError: the result is not one tensor.
            RuntimeError: a layer works in place on what came from another stage, without saying so.
        """
        given, version = x, x._version
        self.announce(microbatch)
        for index in range(len(self.layers)):
            if self.overwrites[index] and _one_memory(x, given):
                x = x.clone()
            x = self.layer(index, x, microbatch)
        if given._version != version:
            raise RuntimeError(
                f"stage {self.number}: a layer from {self.names[0]!r} on works in place on what came from stage "
                f"{self.number - 1}, which must stay as it is; give it an attribute inplace=True, so that it gets a "
                "copy, or cut the model elsewhere"
            )
        return self.finish(x, targets)

    def announce(self, microbatch: int) -> None:
        """Tell that a forward begins."""
        if self.hooks.on_forward is not None:
            self.hooks.on_forward(self.number, microbatch)

    def layer(self, index: int, x: Tensor, microbatch: int) -> Tensor:
        """Run one layer, with the random numbers that are its own."""
        if self.hooks.seeds is not None:
            torch.manual_seed(self.hooks.seeds(microbatch, self.begin + index))
        output: Tensor = self.layers[index](x)
        return output

    def finish(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Make the loss of the last layer's output, where there is one; check what leaves the stage."""
        if not isinstance(x, Tensor):
            raise TypeError(
                f"stage {self.number}: layer {self.names[-1]!r} returned a {type(x).__name__}; one tensor crosses a "
                "cut: put what belongs together into one layer, or cut elsewhere"
            )
        if self.loss is not None and targets is not None:
            x = self.loss(x, targets)
            if not isinstance(x, Tensor) or x.numel() != 1:
                found = f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
                raise ValueError(f"the loss is {found}, wanted a tensor of one number: the mean over a micro-batch")
            x = x.reshape(())
        return x

    @contextmanager
    def again(self) -> Iterator[None]:
        """Keep a second forward of the same micro-batch from counting: buffers stay as they are."""
        modules = [part for layer in self.layers for part in layer.modules()]
        norms = [each for each in modules if isinstance(each, _NormBase)]
        counting = [each for each in norms if each.training and each.track_running_stats]
        own = [
            buffer
            for each in modules
            if not isinstance(each, _NormBase)
            for buffer in each._buffers.values()
            if buffer is not None
        ]
        before = [buffer.clone() for buffer in own]
        for each in counting:
            each.track_running_stats = False
        try:
            yield
        finally:
            for each in counting:
                each.track_running_stats = True
            for buffer, old in zip(own, before, strict=True):
                if not torch.equal(buffer, old):  # a write would count as a change for what saved it
                    buffer.copy_(old)


def _one_memory(x: object, other: Tensor) -> bool:
    return isinstance(x, Tensor) and x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _may_learn(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class Passage(Protocol):
    """A micro-batch's way through a stage."""

    learns: bool  # a backward has something to do

    def forward(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run the stage; return its output, or loss, detached. `x` is a leaf of its own."""
        ...

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Add the gradients of parameters to theirs; return that of `x`, None where it does not learn."""
        ...


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
        return self.through(edge, x, gradient)

    @staticmethod
    def through(edge: GradientEdge, x: Tensor, gradient: Tensor) -> Tensor | None:
        """Go back from an edge; return the gradient of the leaf `x`, None where none comes."""
        if not x.requires_grad:
            torch.autograd.backward((edge,), (gradient,))
            return None
        came: list[Tensor] = []
        with caught(x, came):
            torch.autograd.backward((edge,), (gradient,))
        return came[0] if came else None

    def _record(self, x: Tensor, targets: Tensor | None) -> Tensor:
        output = self.stage.forward(x, self.microbatch, targets)
        self.learns = output.requires_grad
        if self.learns:
            # The edge, not the output: its memory is nobody's once it has been sent.
            self.x, self.edge = x, get_gradient_edge(output)
        return output.detach()


@contextmanager
def caught(x: Tensor, came: list[Tensor]) -> Iterator[None]:
    """Take the gradient of a leaf as it comes: `.grad` may be a copy of other strides, by which sums go otherwise."""

    def take(gradients: tuple[Tensor, ...]) -> tuple[None]:
        came.append(gradients[0])
        return (None,)

    node = get_gradient_edge(x).node
    handle = node.register_prehook(take)
    try:
        yield
    finally:
        handle.remove()


class Recomputed(WholeGraph):
    """An input that is forwarded again."""

    def forward(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run the stage, and keep its input only."""
        self.given, self.targets, self.random = x, targets, RandomState(x, self.stage.hooks)
        with torch.no_grad():
            output = self.stage.forward(x, self.microbatch, targets)
        learning = x.requires_grad or bool(self.stage.learning)
        self.learns = learning and _may_learn(output)
        return output

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Run the stage again, then go back."""
        given, targets = self.given, self.targets
        del self.given, self.targets
        with self.random.as_it_was(), self.stage.again(), torch.enable_grad():
            self._record(given, targets)
        return super().backward(gradient) if self.learns else None


class Layerwise:
    """The inputs of all layers: in the backward one layer's graph at a time."""

    def __init__(self, stage: Stage, microbatch: int) -> None:
        self.stage, self.microbatch = stage, microbatch

    def forward(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run layer after layer, and keep what each was given."""
        stage = self.stage
        self.targets, self.inputs, self.learning, self.random = targets, list[Tensor](), list[bool](), list[Any]()
        learns = x.requires_grad
        stage.announce(self.microbatch)
        with torch.no_grad():
            for index, layer in enumerate(stage.layers):
                self.inputs.append(x)
                self.learning.append(learns)
                self.random.append(RandomState(x, stage.hooks))
                x = self._run(index, x)
                learns = (learns or any(each.requires_grad for each in layer.parameters())) and _may_learn(x)
        self.learns = learns
        return x

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Run and take back one layer after the other, last to first."""
        stage = self.stage
        with stage.again():
            for index in reversed(range(len(stage.layers))):
                x = self.inputs.pop().detach().requires_grad_(self.learning[index])
                with self.random.pop().as_it_was(), torch.enable_grad():
                    output = self._run(index, x)
                parameters = [each for each in stage.layers[index].parameters() if each.requires_grad]
                if not output.requires_grad:
                    return None
                before = self._through(output, x, parameters, gradient)
                if before is None:  # a loop would not go on, either
                    return None
                gradient = before
        return gradient

    def _through(self, output: Tensor, x: Tensor, parameters: list[nn.Parameter], gradient: Tensor) -> Tensor | None:
        """Take one layer back; return the gradient of its input, None where none comes."""
        if self.stage.splits:  # a layer whose weight waits for the queue is on the way to none of the gradients
            return WholeGraph.through(get_gradient_edge(output), x, gradient)
        # one call a layer: of its output, by its parameters and its input
        gradients = torch.autograd.grad(
            output, [*parameters, *([x] if x.requires_grad else [])], gradient, allow_unused=True
        )
        for parameter, own in zip(parameters, gradients, strict=False):
            accumulate(parameter, own)
        return gradients[-1] if x.requires_grad else None

    def _run(self, index: int, x: Tensor) -> Tensor:
        stage = self.stage
        output = stage.layer(index, x.clone() if stage.overwrites[index] else x, self.microbatch)
        return stage.finish(output, self.targets) if index == len(stage.layers) - 1 else output


def accumulate(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Add to `.grad` as autograd's own accumulation does, with its hooks."""
    if gradient is None:
        return
    with torch.no_grad():
        if parameter.grad is None:
            parameter.grad = gradient.clone()  # autograd may give one tensor to several parameters, and to the input
        else:
            parameter.grad += gradient
    hooks: Any = parameter._post_accumulate_grad_hooks
    for hook in (hooks or {}).values():
        hook(parameter)


PASSAGES: Final[dict[str, Callable[[Stage, int], Passage]]] = {
    "whole": WholeGraph,
    "recompute": Recomputed,
    "layerwise": Layerwise,
}
