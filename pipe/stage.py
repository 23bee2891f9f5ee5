"""One pipeline stage: consecutive layers that a rank runs, with protection of their inputs against in-place writes.

A stage must not change its input, which is the output of another stage or the batch. Its first forward in each mode
(training, evaluation) runs on a copy, and detects layers that write to their input. These layers get a copy in later
forwards.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from muster.pipe.buffers import Buffers
from muster.pipe.rng_streams import Hooks
from muster.pipe.weighing import CountedLoss, counted_loss

Loss = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor | float] | CountedLoss]


class Stage:
    """Consecutive layers of a model on one rank. The last stage also computes the loss."""

    def __init__(self, number: int, begin: int, layers: Sequence[tuple[str, nn.Module]], hooks: Hooks) -> None:
        self.number, self.begin = number, begin
        self.names = [name for name, _ in layers]
        self.layers = [layer for _, layer in layers]
        self.hooks = hooks
        self.loss: Loss | None = None
        self.counts: bool | None = None  # True: the loss returns pairs (sum, count); None: not known yet
        self._parameters = [part._parameters for layer in self.layers for part in layer.modules()]
        # Layers that overwrite their input get a copy. The first forward detects those without an `inplace` attribute.
        self.overwrites = [any(getattr(part, "inplace", False) for part in layer.modules()) for layer in self.layers]
        self._met: set[bool] = set()  # values of `training` with which a forward has run
        self.buffers = Buffers(layers)

    @property
    def learning(self) -> list[nn.Parameter]:
        """List the trainable parameters, each once."""
        held = (each for own in self._parameters for each in own.values() if each is not None and each.requires_grad)
        return list({id(each): each for each in held}.values())

    def forward(self, x: Tensor, microbatch: int, targets: Tensor | None = None) -> Tensor:
        """Run all layers, then the loss if `targets` are given.

        Raises:
            TypeError: If the result is not a single tensor.
            RuntimeError: If a layer overwrites the stage's input, but did not do so in its first forward.
        """
        self.announce(microbatch)
        if self._is_new():
            return self._finish(self._first(x, microbatch), targets)
        given, version, index = x, x._version, 0
        try:
            for index in range(len(self.layers)):
                if self.overwrites[index] and _one_memory(x, given):
                    x = x.clone()
                x = self._layer(index, x, microbatch)
        except RuntimeError as error:
            if "a leaf Variable that requires grad is being used in an in-place" not in str(error):
                raise
            raise self._overwritten(index, index) from error
        if given._version != version:
            raise self._overwritten(0, index)
        return self._finish(x, targets)

    def _is_new(self) -> bool:
        """Return True for the first forward in each mode (training, evaluation), which detects in-place layers."""
        training = self.layers[0].training
        if training in self._met:
            return False
        self._met.add(training)
        return True

    def _first(self, x: Tensor, microbatch: int) -> Tensor:
        """Run all layers on a copy, and note the first one that overwrites its input."""
        given = x = x.clone()
        for index in range(len(self.layers)):
            x = self._layer(index, x, microbatch)
            if given._version:  # the version counts writes, and was 0 at first
                self.overwrites[index] = True
                given = x.new_empty(0)
        return x

    def _overwritten(self, first: int, last: int) -> RuntimeError:
        """Build the error for a layer that overwrites its input only in some forwards."""
        which = f"layer {self.names[first]!r}" if first == last else f"one of layers {self.names[first]!r} to "
        which += "" if first == last else repr(self.names[last])
        given = f"the output of stage {self.number - 1}" if self.number else "the batch"
        return RuntimeError(
            f"stage {self.number}: {which} overwrites {given}, unlike in its first forward; "
            "give the layer an attribute inplace=True, so that it gets a copy"
        )

    def announce(self, microbatch: int) -> None:
        """Call the user's `on_forward` hook."""
        if self.hooks.on_forward is not None:
            self.hooks.on_forward(self.number, microbatch)

    def seeds(self, microbatch: int) -> list[int]:
        """Return the seeds of a micro-batch's forward, one for each layer; empty if the user set no seeds."""
        seeds = self.hooks.seeds
        return [] if seeds is None else [seeds(microbatch, self.begin + index) for index in range(len(self.layers))]

    def _layer(self, index: int, x: Tensor, microbatch: int) -> Tensor:
        """Run one layer, with its own random seed if the user set seeds."""
        if self.hooks.seeds is not None:
            self.hooks.seed(self.hooks.seeds(microbatch, self.begin + index))
        output: Tensor = self.layers[index](x)
        return output

    def _finish(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Compute the loss of the last layer's output on the last stage, and check the type of the result."""
        if not isinstance(x, Tensor):
            raise TypeError(
                f"stage {self.number}: layer {self.names[-1]!r} returned a {type(x).__name__}; one tensor crosses a "
                "cut; combine the layers that exchange several values into one, or cut elsewhere"
            )
        if self.loss is not None and targets is not None:
            x = self._loss(self.loss(x, targets), targets)
        return x

    def _loss(self, value: Any, targets: Tensor) -> Tensor:
        """Return the mean loss of a micro-batch, a scalar; or mean and count, (2,), if the loss is a pair."""
        counted = counted_loss(self.loss, value, targets)
        if counted is None and not (isinstance(value, Tensor) and value.numel() == 1):
            found = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(
                f"the loss is {found}; expected a tensor with one element, the mean over a micro-batch, or a pair "
                "(sum, count) of scalars"
            )
        before, self.counts = self.counts, counted is not None
        if before not in (None, self.counts):
            raise ValueError(
                "the loss returned a mean in one micro-batch and a pair (sum, count) in another; always return the same"
            )
        return value.reshape(()) if counted is None else counted.packed()


def _one_memory(x: object, other: Tensor) -> bool:
    return isinstance(x, Tensor) and x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class MicrobatchPass(Protocol):
    """The forward and backward of one micro-batch through one stage."""

    learns: bool  # True if the backward has gradients to compute

    def forward(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run the stage; return its output or loss, detached.

        `x` must be a leaf of the autograd graph that is used nowhere else.
        """
        ...

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Add to the gradients of parameters; return the gradient of `x`, or None if `x` needs none."""
        ...


Make = Callable[[Stage, int], MicrobatchPass]
