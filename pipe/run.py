"""One step, or one evaluation, on one rank: every operation of its row, and what is handed from one to the next.

    F   takes an activation, makes one       ─┐ to the next stage: by `Channels`, or by hand where it is on this rank
    B   takes a gradient, makes one          ─┘ or to the stage before
    I   the same, but weights of linear layers and convolutions get their gradients by W

Buffers of received tensors are given back after B, or W: what autograd saved lies in them until then.
"""

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.pipe.marks import Mark
from muster.pipe.schedules.actions import Action, Schedule
from muster.pipe.schedules.backlog import Way, backlogs
from muster.pipe.schedules.checks import check
from muster.pipe.schedules.messages import with_messages
from muster.pipe.schedules.programs import Key, Receive, Send, Step, What, received_before, sent_after
from muster.pipe.splitting.halves import WeightQueue
from muster.pipe.stage import Passage, Stage
from muster.pipe.wires.channels import Arrival, Channels, Form
from muster.pipe.wires.meeting import Meeting


class Held(nn.Module):
    """Layers under the names that they have in the whole model, which may be dotted; others know their order."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self._layers = [layer for _, layer in layers]
        for name, layer in layers:
            *above, last = name.split(".")
            place: nn.Module = self
            for each in above:  # a layer from within a module of the whole model
                if each not in place._modules:
                    place.add_module(each, nn.Module())
                place = place.get_submodule(each)
            place.add_module(last, layer)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the forward of each layer by itself, as `nn.Module.compile` does: it is layers that stages run."""
        for layer in self._layers:
            layer.compile(*args, **kwargs)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Refuse another layer: the stages would go on with the first one."""
        self._require_new(name)
        super().add_module(name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse another layer here, too."""
        self._require_new(name)
        super().__setattr__(name, value)

    def _require_new(self, name: str) -> None:
        if name in self.__dict__.get("_modules", ()):
            raise AttributeError(f"layer {name!r} of a pipeline stays; change it before the Pipeline is built")


def check_model(
    layers: nn.Sequential,
    process_group: dist.ProcessGroup | None,
    schedule: Schedule,
    loss: Callable[..., Any],
    *,
    layerwise: bool,
    recompute: bool,
) -> None:
    """Refuse what cannot be a pipeline, before anything is sent."""
    if not isinstance(layers, nn.Sequential):
        raise TypeError(f"a pipeline is cut from the layers of an nn.Sequential, got a {type(layers).__name__}")
    ranks = dist.get_world_size(process_group) if dist.is_initialized() else 1
    if schedule.ranks != ranks:
        raise ValueError(f"schedule {schedule.name} is for {schedule.ranks} ranks, the group has {ranks}")
    if layerwise and recompute:
        raise ValueError("layerwise and recompute: layerwise forwards every layer again anyway; drop one of the two")
    if layerwise and isinstance(loss, nn.Module) and any(each.requires_grad for each in loss.parameters()):
        raise ValueError(
            "layerwise: the loss has parameters that learn, and only layers' get gradients; move them into the last "
            "layer, or leave layerwise out"
        )
    of_layers = {id(each) for layer in layers for each in (*layer.parameters(), *layer.buffers())}
    for name, each in (*layers.named_parameters(), *layers.named_buffers()):
        if id(each) not in of_layers:
            raise ValueError(f"{name} belongs to no layer, so to no stage; move it into one")


def device_of(*modules: nn.Module) -> torch.device:
    """Return where the first of some modules that has a parameter or buffer is."""
    held = (each for module in modules for each in (*module.parameters(), *module.buffers()))
    first = next(held, None)
    return torch.device("cpu") if first is None else first.device


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and each of its parts back into what it was in."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training


Kind = Literal["F", "B", "I", "W", "send", "ask", "wait"]


class Operation(NamedTuple):
    """One thing to do."""

    kind: Kind
    step: Step


class Row(NamedTuple):
    """A rank's operations, the messages that come to it, in their order, and how many may lie on each rank's ways."""

    operations: tuple[Operation, ...]
    receives: tuple[Receive, ...]
    backlogs: Mapping[Way, int]


def row_of(schedule: Schedule, rank: int, microbatches: int, *, forwards_only: bool = False) -> Row:
    """Return what a rank does for so many micro-batches, at most the schedule's.

    Raises:
        ScheduleError: it does not do all of a step, once, in an order that can be.
    """
    actions = tuple(tuple(each for each in row if each.microbatch < microbatches) for row in schedule.actions)
    if forwards_only:
        ranks = [_forwards(each, schedule.rank_of) for each in actions]
        coming = tuple(each for peer, steps in enumerate(ranks) for each in _coming(steps, peer, rank))
        return Row(tuple(_operations(ranks[rank], schedule)), coming, backlogs(ranks))
    program = with_messages(replace(schedule, microbatches=microbatches, actions=actions))
    check(program)
    steps = program.steps[rank]
    coming = tuple(each for each in steps if isinstance(each, Receive))
    return Row(tuple(_operations(steps, schedule)), coming, backlogs(program.steps))


def _forwards(actions: Sequence[Action], rank_of: tuple[int, ...]) -> tuple[Step, ...]:
    """Do forwards in their order, each between what it needs and what it makes: nothing comes back."""
    forwards = (each for each in actions if each.kind == "F")
    steps = ((received_before(each, rank_of), each, sent_after(each, rank_of)) for each in forwards)
    return tuple(step for each in steps for step in each if step is not None)


def _coming(steps: Sequence[Step], peer: int, rank: int) -> list[Receive]:
    """List what a peer sends to a rank, in its order."""
    sends = [each for each in steps if isinstance(each, Send) and each.peer == rank]
    return [Receive(each.what, each.stage, each.microbatch, peer) for each in sends]


def _operations(steps: Sequence[Step], schedule: Schedule) -> list[Operation]:
    operations = []
    for step in steps:
        if isinstance(step, Action):
            if received := received_before(step, schedule.rank_of):
                operations.append(Operation("wait", received))
            operations.append(Operation(step.kind, step))
        else:
            operations.append(Operation("send" if isinstance(step, Send) else "ask", step))
    return operations


def part_lengths(samples: int, parts: int) -> list[int]:
    """Cut a batch into parts that differ by one sample at most, larger ones first; fewer, where samples are fewer."""
    parts = min(parts, samples)
    length, longer = divmod(samples, parts)
    return [length + (part < longer) for part in range(parts)]


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
    ) -> None:
        self.stages, self.last_stage = stages, last_stage
        self.channels, self.make, self.queue = channels, make, queue
        self.on_last_backward: Callable[[int], None] | None = None
        self.results: dict[int, Tensor] = {}  # of the last stage, by micro-batch: losses, or outputs
        self.now: Callable[[], Mark] = time.monotonic
        self.marked: list[tuple[Step, Mark, Mark]] = []  # before and after each step
        self.at: Action | None = None  # for who asks what failed
        self._handed: dict[Key, Handed] = {}
        self._made: dict[Key, tuple[Tensor | None, bool]] = {}
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
        self._handed[step.key] = Handed(arrival.buffer, arrival.learns, arrival)

    def send(self, step: Send) -> None:
        """Send what was made."""
        assert self.channels is not None
        tensor, learns = self._made.pop(step.key)
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

    def _hand_over(self, what: What, stage: int, microbatch: int, tensor: Tensor | None, *, learns: bool) -> None:
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
