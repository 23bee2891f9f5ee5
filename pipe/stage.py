"""One stage: layers that a rank runs one after the other, and what it learns of them by running them.

What a layer is given may not be its own to overwrite: it came from another stage, or is the batch. The first forward in
training, and the first one in evaluation, run on a copy, which shows the layers that work in place on what they are
given; from then on those get copies.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

from muster.pipe.buffers import Buffers
from muster.pipe.draws import Hooks, seed_generators

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
            seed_generators(self.hooks.seeds(microbatch, self.begin + index))
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


class Passage(Protocol):
    """A micro-batch's way through a stage."""

    learns: bool  # a backward has something to do

    def forward(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run the stage; return its output, or loss, detached. `x` is a leaf of its own."""
        ...

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Add the gradients of parameters to theirs; return that of `x`, None where it does not learn."""
        ...


Make = Callable[[Stage, int], Passage]
