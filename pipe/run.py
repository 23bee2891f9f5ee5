"""One step, or one evaluation, on one rank: every operation of its row, and what is handed from one to the next.

    F   takes an activation, makes one       ─┐ to the next stage: by `Channels`, or by hand where it is on this rank
    B   takes a gradient, makes one          ─┘ or to the stage before
    I   the same, but weights of linear layers and convolutions get their gradients by W

Buffers of received tensors are given back after B, or W: what autograd saved lies in them until then.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from muster.pipe.marks import Mark
from muster.pipe.rows import Row
from muster.pipe.schedules.actions import Action
from muster.pipe.schedules.programs import Receive, Send, Step
from muster.pipe.splitting.halves import WeightQueue
from muster.pipe.stage import Passage, Stage
from muster.pipe.wires.channels import Arrival, Channels, Form


class Span(NamedTuple):
    """When this rank did a step of its row, by `time.monotonic()`: work, a send, or the wait for what it received.

    On a GPU: when its computing stream did. A wait there is the time in which that stream had nothing else to do.
    """

    step: Step
    start_s: float
    end_s: float


class Parts(NamedTuple):
    """A batch in micro-batches."""

    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    weights: Sequence[float]  # share of the batch's samples
    forms: list[Form]


class Handed(NamedTuple):
    """A tensor for a stage; None where nothing learns."""

    tensor: Tensor | None
    learns: bool
    arrival: Arrival | None  # None: it was made on this rank


class Run:
    """What happens between the begin and the end of a row."""

    def __init__(
        self,
        stages: dict[int, Stage],
        last_stage: int,
        channels: Channels | None,
        make: Callable[[Stage, int], Passage] | None,
        queue: WeightQueue | None,
        on_last_backward: Callable[[int], None] | None = None,
    ) -> None:
        self.stages, self.last_stage = stages, last_stage
        self.channels, self.make, self.queue, self.on_last_backward = channels, make, queue, on_last_backward
        self.results: dict[int, Tensor] = {}  # of the last stage, by micro-batch: losses, or outputs
        self.now: Callable[[], Mark] = time.monotonic
        self.marked: list[tuple[Step, Mark, Mark]] = []  # before and after each step
        self.at: Action | None = None  # for who asks what failed
        self._handed: dict[tuple[str, int, int], Handed] = {}
        self._made: dict[tuple[str, int, int], tuple[Tensor | None, bool]] = {}
        self._passages: dict[tuple[int, int], Passage] = {}
        self._borrowed: dict[tuple[int, int], list[Arrival]] = {}
        self._fresh: dict[int, list[nn.Parameter]] = {}  # of each stage the parameters that have no gradient yet
        self._do: dict[str, Callable[..., None]] = {
            "F": self.forward,
            "B": self.backward,
            "I": self.input_gradient,
            "W": self.weight_gradient,
            "send": self.send,
            "ask": self.ask,
            "wait": self.wait,
        }

    def run(self, row: Row, parts: Parts) -> None:
        """Do all of a row."""
        self.parts = parts
        if self.channels is not None:
            self.channels.begin(row.receives, parts.forms, forwards_only=self.make is None)
        now, marked, do = self.now, self.marked, self._do
        before = now()
        for kind, step in row.operations:
            do[kind](step)
            after = now()
            if kind != "ask":
                marked.append((step, before, after))
            before = after

    # Messages -------------------------------------------------------------------------------------------------------

    def ask(self, step: Receive) -> None:
        """Ask for a message."""
        assert self.channels is not None
        self.channels.ask(step)

    def wait(self, step: Receive) -> None:
        """Wait for a message, for the stage that needs it next."""
        assert self.channels is not None
        arrival = self.channels.wait(step)
        self._handed[step.what, step.stage, step.microbatch] = Handed(arrival.buffer, arrival.learns, arrival)

    def send(self, step: Send) -> None:
        """Send what was made."""
        assert self.channels is not None
        tensor, learns = self._made.pop((step.what, step.stage, step.microbatch))
        self.channels.send(step, tensor, learns=learns)

    # Work -----------------------------------------------------------------------------------------------------------

    def forward(self, action: Action) -> None:
        """Run a stage."""
        self.at = action
        if self.channels is not None:
            self.channels.forget_sent_gradients()
        number, microbatch = action.stage, action.microbatch
        stage, parts = self.stages[number], self.parts
        if number == 0:
            x = parts.inputs[microbatch]
        else:
            handed = self._handed.pop(("activation", number, microbatch))
            assert handed.tensor is not None
            x = handed.tensor.detach().requires_grad_(handed.learns and self.make is not None)
            if handed.arrival is not None:
                self._borrowed[number, microbatch] = [handed.arrival]
        targets = parts.targets[microbatch] if parts.targets and number == self.last_stage else None
        if self.make is None:
            output, learns = stage.forward(x, microbatch, targets), False
        else:
            passage = self._passages[number, microbatch] = self.make(stage, microbatch)
            output = passage.forward(x, targets)
            learns = passage.learns
        if self.make is None or number == self.last_stage:
            output = self._own(output)  # an evaluation gives the buffer back at once, a loss outlives it
        if number == self.last_stage:
            if self.make is not None and not learns:
                raise RuntimeError(f"stage {number}: the loss does not require a gradient: nothing of it learns")
            self.results[microbatch] = output
        else:
            self._hand_over("activation", number + 1, microbatch, output, learns=learns)
        if self.make is None:
            self._give_back(number, microbatch)

    def backward(self, action: Action) -> None:
        """Take a micro-batch back through a stage."""
        if self.queue is not None:
            self.input_gradient(action)
            self.weight_gradient(action)
            return
        self._backward(action)
        self._end(action)

    def input_gradient(self, action: Action) -> None:
        """Take a micro-batch back, but leave what the queue takes for later."""
        assert self.queue is not None
        with self.queue.collecting((action.stage, action.microbatch)):
            self._backward(action)

    def weight_gradient(self, action: Action) -> None:
        """Do what was left."""
        assert self.queue is not None
        self.at = action
        self.queue.run((action.stage, action.microbatch))
        self._end(action)

    def _backward(self, action: Action) -> None:
        self.at = action
        number, microbatch = action.stage, action.microbatch
        passage = self._passages.pop((number, microbatch))
        gradient, x_gradient = self._gradient(number, microbatch), None
        if passage.learns and gradient is not None:
            fresh = self._fresh.get(number)
            if fresh is None:
                fresh = [each for each in self.stages[number].learning if each.grad is None]
            x_gradient = passage.backward(gradient)
            self._fresh[number] = _make_own(fresh, gradient, x_gradient) if fresh else fresh
        if number:
            learns = x_gradient is not None
            self._hand_over("gradient", number - 1, microbatch, x_gradient, learns=learns)

    def _gradient(self, number: int, microbatch: int) -> Tensor | None:
        """Return the gradient of a stage's output; the loss counts by its share of the samples."""
        if number == self.last_stage:
            loss = self.results[microbatch]
            return torch.full_like(loss, self.parts.weights[microbatch])
        handed = self._handed.pop(("gradient", number, microbatch))
        if handed.arrival is not None and handed.tensor is not None:
            self._borrowed.setdefault((number, microbatch), []).append(handed.arrival)
        return handed.tensor

    def _hand_over(self, what: str, stage: int, microbatch: int, tensor: Tensor | None, *, learns: bool) -> None:
        if stage in self.stages:  # this stage may be through with a buffer before that one is
            own = None if tensor is None else self._own(tensor)
            self._handed[what, stage, microbatch] = Handed(own, learns, None)
        else:
            self._made[what, stage, microbatch] = (tensor, learns)

    def _own(self, tensor: Tensor) -> Tensor:
        """Return a tensor that no message overwrites: itself, or a copy of what lies in a buffer."""
        lent = self.channels is not None and self.channels.is_buffer(tensor)
        return tensor.detach().clone() if lent else tensor

    def _end(self, action: Action) -> None:
        self._give_back(action.stage, action.microbatch)
        if action.microbatch == len(self.parts.weights) - 1 and self.on_last_backward is not None:
            self.on_last_backward(action.stage)

    def _give_back(self, number: int, microbatch: int) -> None:
        for arrival in self._borrowed.pop((number, microbatch), ()):
            assert self.channels is not None
            self.channels.release(arrival)


def _make_own(fresh: list[nn.Parameter], *messages: Tensor | None) -> list[nn.Parameter]:
    """Copy first gradients that autograd made of a message's memory without a copy; return who has none yet.

    What comes or goes would change the gradient, and what is added to the gradient would change what goes.
    """
    memory = {each.untyped_storage().data_ptr() for each in messages if each is not None}
    left = []
    for parameter in fresh:
        if parameter.grad is None:
            left.append(parameter)
        elif parameter.grad.layout == torch.strided and parameter.grad.untyped_storage().data_ptr() in memory:
            parameter.grad = parameter.grad.clone()
    return left
