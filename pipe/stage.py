"""One stage's work for one micro-batch: a forward, and later its backward, in one of three ways.

    WholeGraph   forward: a graph of all layers            backward: through autograd at once
    Recomputed   forward: only the stage's input stays     backward: forward again, then as above
    Layerwise    forward: only layers' inputs stay         backward: layer by layer, one `autograd.grad` each

The second forward draws the same random numbers, reads buffers as the first one did (`pipe/buffers.py`) and leaves them
alone. All three add to `.grad` what a backward in one process would. What goes on to the next stage is detached; of an
output autograd keeps only what its operations saved, so memory is free once it has been sent.

Running statistics of batch norms are updated by every micro-batch in turn, and each is normalized by its own.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipe.buffers import Before, Buffers
from pipe.draws import Hooks, RandomState

Loss = Callable[[Tensor, Tensor], Tensor]
_run_backward: Final = Variable._execution_engine.run_backward


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
        # What comes from another stage is not ours to overwrite: who does gets a copy. First forwards tell of others.
        self.overwrites = [any(getattr(part, "inplace", False) for part in layer.modules()) for layer in self.layers]
        self._met: set[bool] = set()  # whether the first layer was in training in a forward
        self.buffers = Buffers(layers)
        self.buffers_of = [Buffers([each]) for each in layers]

    @property
    def learning(self) -> list[nn.Parameter]:
        """List the parameters that learn, each once."""
        held = (each for own in self._parameters for each in own.values() if each is not None and each.requires_grad)
        return list({id(each): each for each in held}.values())

    def forward(self, x: Tensor, microbatch: int, targets: Tensor | None = None) -> Tensor:
        """Run all layers, and the loss where there are targets.

        Raises:
            TypeError: the result is not one tensor.
            RuntimeError: a layer works in place on what came from another stage, which it did not in its first forward.
        """
        self.announce(microbatch)
        if self.is_new():
            return self.finish(self._first(x, microbatch), targets)
        given, version, index = x, x._version, 0
        try:
            for index in range(len(self.layers)):
                if self.overwrites[index] and _one_memory(x, given):
                    x = x.clone()
                x = self.layer(index, x, microbatch)
        except RuntimeError as error:
            if "a leaf Variable that requires grad is being used in an in-place" not in str(error):
                raise
            raise self.overwritten(index) from error
        if given._version != version:
            raise self.overwritten(0, index)
        return self.finish(x, targets)

    def is_new(self) -> bool:
        """True in the first forward in training, and in evaluation: layers are watched, as they may work in place."""
        training = self.layers[0].training
        if training in self._met:
            return False
        self._met.add(training)
        return True

    def _first(self, x: Tensor, microbatch: int) -> Tensor:
        """Run all layers on a copy, and learn which is the first that works in place on what it is given."""
        given = x = x.clone()
        for index in range(len(self.layers)):
            x = self.layer(index, x, microbatch)
            if given._version:  # of a copy: 0 until somebody writes
                self.overwrites[index] = True
                given = x.new_empty(0)
        return x

    def overwritten(self, first: int, last: int | None = None, *, layerwise: bool = False) -> RuntimeError:
        """Make the error of a layer that works in place now and then."""
        last = first if last is None else last
        which = f"layer {self.names[first]!r}" if first == last else f"one of layers {self.names[first]!r} to "
        which += "" if first == last else repr(self.names[last])
        given = f"what came from stage {self.number - 1}" if self.number else "the batch"
        given = "its input" if layerwise else given
        return RuntimeError(
            f"stage {self.number}: {which} works in place on {given}, which must stay as it is, and did not in its "
            "first forward; give it an attribute inplace=True, so that it gets a copy"
        )

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
        """Run the stage again, then go back."""
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
        stage = self.stage
        for index in reversed(range(len(stage.layers))):
            x = self.inputs.pop().detach().requires_grad_(self.learning[index])
            with self.random.pop().as_it_was(), self.before.pop().as_they_were(), torch.enable_grad():
                output = self._run(index, x)
            parameters = [each for each in stage.layers[index].parameters() if each.requires_grad]
            if not output.requires_grad:
                return None
            of_x = self._through(output, x, parameters, gradient)
            if of_x is None:  # a loop would not go on, either
                return None
            gradient = of_x
        return gradient

    def _forward(self, index: int, x: Tensor, *, is_new: bool) -> Tensor:
        """Run a layer whose input must stay as it is."""
        given = x.clone() if is_new else x
        version = given._version
        output = self._run(index, given)
        if given._version != version:
            if not is_new:
                raise self.stage.overwritten(index, layerwise=True)
            self.stage.overwrites[index] = True
        return output

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


Make = Callable[[Stage, int], Passage]
PASSAGES: Final[dict[str, Make]] = {
    "whole": WholeGraph,
    "recompute": Recomputed,
    "layerwise": Layerwise,
}
