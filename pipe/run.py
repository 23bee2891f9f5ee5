"""One step or evaluation on one rank: run every operation of its row, and pass each result to its consumer.

    F   takes an activation, makes one       ─┐ for the next stage: through `Channels`, or directly on the same rank
    B   takes a gradient, makes one          ─┘ for the previous stage
    I   as B, but leaves the weight gradients of linear layers and convolutions to W

The buffer of a received tensor is released after B or W, because autograd saves views of it.
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
from muster.pipe.stage import MicrobatchPass, Stage
from muster.pipe.wires.channels import Arrival, Channels, Form
from muster.pipe.wires.connections import Connections


class StageLayers(nn.Module):
    """A container of layers, each under its name in the whole model.

    Names may contain dots. The container cannot be called.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self._layers = [layer for _, layer in layers]
        for name, layer in layers:
            *above, last = name.split(".")
            place: nn.Module = self
            for each in above:  # create the parent modules in a dotted name
                if each not in place._modules:
                    place.add_module(each, nn.Module())
                place = place.get_submodule(each)
            place.add_module(last, layer)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each layer separately with `nn.Module.compile`, because stages call layers one by one."""
        for layer in self._layers:
            layer.compile(*args, **kwargs)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Refuse to replace a layer, because the stages would still use the old one."""
        self._require_new(name)
        super().add_module(name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to replace a layer by assignment."""
        self._require_new(name)
        super().__setattr__(name, value)

    def _require_new(self, name: str) -> None:
        if name in self.__dict__.get("_modules", ()):
            raise AttributeError(
                f"layer {name!r} of a pipeline cannot be replaced; replace it before building the Pipeline"
            )


def check_model(layers: nn.Sequential, process_group: dist.ProcessGroup | None, schedule: Schedule) -> None:
    """Refuse a model or schedule that cannot form a pipeline, before any communication."""
    if not isinstance(layers, nn.Sequential):
        raise TypeError(f"a pipeline needs an nn.Sequential to cut into stages, got a {type(layers).__name__}")
    ranks = dist.get_world_size(process_group) if dist.is_initialized() else 1
    if schedule.ranks != ranks:
        raise ValueError(f"schedule {schedule.name} is for {schedule.ranks} ranks, but the group has {ranks}")
    of_layers = {id(each) for layer in layers for each in (*layer.parameters(), *layer.buffers())}
    for name, each in (*layers.named_parameters(), *layers.named_buffers()):
        if id(each) not in of_layers:
            raise ValueError(f"{name} belongs to no layer and therefore to no stage; move it into a layer")


def device_of(*modules: nn.Module) -> torch.device:
    """Return the device of the first parameter or buffer of these modules; the CPU if there is none."""
    held = (each for module in modules for each in (*module.parameters(), *module.buffers()))
    first = next(held, None)
    return torch.device("cpu") if first is None else first.device


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode within the block; afterwards restore the mode of each submodule."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training


Kind = Literal["F", "B", "I", "W", "send", "ask", "wait"]


class RowOperation(NamedTuple):
    """One entry of a row: an operation, and the step of the program it belongs to."""

    kind: Kind
    step: Step


class RankOperations(NamedTuple):
    """A rank's operations, its incoming messages in order, and the largest backlog (`backlogs`) between ranks."""

    operations: tuple[RowOperation, ...]
    receives: tuple[Receive, ...]
    backlogs: Mapping[Way, int]


def row_of(schedule: Schedule, rank: int, microbatches: int, *, forwards_only: bool = False) -> RankOperations:
    """Return the row of a rank for `microbatches` micro-batches, at most as many as the schedule has.

    As in `Schedule.microbatches`, each slice counts as a micro-batch. In an evaluation, `microbatches` may count whole
    sequences instead.

    Raises:
        ScheduleError: If the row is incomplete, repeats an action, or has an impossible order.
    """
    actions = tuple(tuple(each for each in row if each.microbatch < microbatches) for row in schedule.actions)
    if forwards_only:
        ranks = [_forwards(each, schedule.rank_of) for each in actions]
        coming = tuple(each for peer, steps in enumerate(ranks) for each in _coming(steps, peer, rank))
        return RankOperations(tuple(_operations(ranks[rank], schedule)), coming, backlogs(ranks))
    program = with_messages(replace(schedule, microbatches=microbatches, actions=actions))
    check(program)
    steps = program.steps[rank]
    coming = tuple(each for each in steps if isinstance(each, Receive))
    return RankOperations(tuple(_operations(steps, schedule)), coming, backlogs(program.steps))


def _forwards(actions: Sequence[Action], rank_of: tuple[int, ...]) -> tuple[Step, ...]:
    """Return the forwards in order, each with its receive before it and its send after it, without any gradients."""
    forwards = (each for each in actions if each.kind == "F")
    steps = ((received_before(each, rank_of), each, sent_after(each, rank_of)) for each in forwards)
    return tuple(step for each in steps for step in each if step is not None)


def _coming(steps: Sequence[Step], peer: int, rank: int) -> list[Receive]:
    """List the messages that a peer sends to a rank, in order."""
    sends = [each for each in steps if isinstance(each, Send) and each.peer == rank]
    return [Receive(each.what, each.stage, each.microbatch, peer) for each in sends]


def _operations(steps: Sequence[Step], schedule: Schedule) -> list[RowOperation]:
    operations = []
    for step in steps:
        if isinstance(step, Action):
            if received := received_before(step, schedule.rank_of):
                operations.append(RowOperation("wait", received))
            operations.append(RowOperation(step.kind, step))
        else:
            operations.append(RowOperation("send" if isinstance(step, Send) else "ask", step))
    return operations


def part_lengths(samples: int, parts: int) -> list[int]:
    """Return the lengths of `parts` parts (at most one per sample).

    The lengths differ by at most one; longer parts come first.
    """
    parts = min(parts, samples)
    length, longer = divmod(samples, parts)
    return [length + (part < longer) for part in range(parts)]


class BatchParts(NamedTuple):
    """A batch cut into micro-batches."""

    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    samples: Sequence[float]  # number of samples; a slice of a sequence counts as a fraction of a sample
    weights: Sequence[float]  # each micro-batch's share of the samples
    forms: list[Form]
    last_backward: int  # the micro-batch whose backward completes the gradients of a stage


class StageInput(NamedTuple):
    """An input of a stage's forward or backward. `tensor` is None if no gradient is needed."""

    tensor: Tensor | None
    learns: bool
    arrival: Arrival | None  # None if the tensor was computed on this rank


class RowExecution:
    """The execution of one row, from start to end."""

    def __init__(
        self,
        stages: dict[int, Stage],
        last_stage: int,
        channels: Channels | None,
        make: Callable[[Stage, int], MicrobatchPass] | None,
        queue: WeightQueue | None,
    ) -> None:
        self.stages, self.last_stage = stages, last_stage
        self.channels, self.make, self.queue = channels, make, queue
        self.on_last_backward: Callable[[int], None] | None = None
        self.results: dict[int, Tensor] = {}  # losses or outputs of the last stage, by micro-batch
        self.now: Callable[[], Mark] = time.monotonic
        self.marked: list[tuple[Step, Mark, Mark]] = []  # each step with the marks before and after it
        self.at: Action | None = None  # the current action, for error messages
        self._handed: dict[Key, StageInput] = {}
        self._made: dict[Key, tuple[Tensor | None, bool]] = {}
        self._passes: dict[tuple[int, int], MicrobatchPass] = {}
        self._borrowed: dict[tuple[int, int], list[Arrival]] = {}
        self._fresh: dict[int, list[nn.Parameter]] = {}  # the parameters of each stage that have no gradient yet
        self._do: dict[str, Callable[..., None]] = {
            "F": self.forward,
            "B": self.backward,
            "I": self.input_gradient,
            "W": self.weight_gradient,
            "send": self.send,
            "ask": self.ask,
            "wait": self.wait,
        }

    def run(self, row: RankOperations, parts: BatchParts) -> None:
        """Run all operations of a row."""
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
        """Post the receive of a message."""
        assert self.channels is not None
        self.channels.ask(step)

    def wait(self, step: Receive) -> None:
        """Wait for a message, and keep it for the stage that consumes it."""
        assert self.channels is not None
        arrival = self.channels.wait(step)
        self._handed[step.key] = StageInput(arrival.buffer, arrival.learns, arrival)

    def send(self, step: Send) -> None:
        """Send a tensor that an earlier action computed."""
        assert self.channels is not None
        tensor, learns = self._made.pop(step.key)
        self.channels.send(step, tensor, learns=learns)

    # Work -----------------------------------------------------------------------------------------------------------

    def forward(self, action: Action) -> None:
        """Run the forward of a stage."""
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
            microbatch_pass = self._passes[number, microbatch] = self.make(stage, microbatch)
            output = microbatch_pass.forward(x, targets)
            learns = microbatch_pass.learns
        if self.make is None or number == self.last_stage:
            output = self._own(output)  # copied, because results are used after the buffer is released
        if number == self.last_stage:
            if self.make is not None and not learns:
                raise RuntimeError(f"stage {number}: the loss does not require a gradient; nothing would be trained")
            self.results[microbatch] = output
        else:
            self._hand_over("activation", number + 1, microbatch, output, learns=learns)
        if self.make is None:
            self._give_back(number, microbatch)

    def backward(self, action: Action) -> None:
        """Run the backward of a micro-batch through a stage."""
        if self.queue is not None:
            self.input_gradient(action)
            self.weight_gradient(action)
            return
        self._backward(action)
        self._end(action)

    def input_gradient(self, action: Action) -> None:
        """Run the backward of a micro-batch, but leave its weight gradients to the queue."""
        assert self.queue is not None
        with self.queue.collecting((action.stage, action.microbatch)):
            self._backward(action)

    def weight_gradient(self, action: Action) -> None:
        """Compute the weight gradients that `input_gradient` left to the queue."""
        assert self.queue is not None
        self.at = action
        self.queue.run((action.stage, action.microbatch))
        self._end(action)

    def _backward(self, action: Action) -> None:
        self.at = action
        number, microbatch = action.stage, action.microbatch
        microbatch_pass = self._passes.pop((number, microbatch))
        gradient, x_gradient = self._gradient(number, microbatch), None
        if microbatch_pass.learns and gradient is not None:
            fresh = self._fresh.get(number)
            if fresh is None:
                fresh = [each for each in self.stages[number].learning if each.grad is None]
            x_gradient = microbatch_pass.backward(gradient)
            self._fresh[number] = _make_own(fresh, gradient, x_gradient) if fresh else fresh
        if number:
            learns = x_gradient is not None
            self._hand_over("gradient", number - 1, microbatch, x_gradient, learns=learns)

    def _gradient(self, number: int, microbatch: int) -> Tensor | None:
        """Return the gradient of a stage's output; for a loss, the micro-batch's share of the samples."""
        if number == self.last_stage:
            loss = self.results[microbatch]
            return torch.full_like(loss, self.parts.weights[microbatch])
        handed = self._handed.pop(("gradient", number, microbatch))
        if handed.arrival is not None and handed.tensor is not None:
            self._borrowed.setdefault((number, microbatch), []).append(handed.arrival)
        return handed.tensor

    def _hand_over(self, what: What, stage: int, microbatch: int, tensor: Tensor | None, *, learns: bool) -> None:
        if stage in self.stages:  # a copy, because this stage may release the buffer before the other stage has read it
            own = None if tensor is None else self._own(tensor)
            self._handed[what, stage, microbatch] = StageInput(own, learns, None)
        else:
            self._made[what, stage, microbatch] = (tensor, learns)

    def _own(self, tensor: Tensor) -> Tensor:
        """Return a tensor that no message will overwrite: the tensor itself, or a copy if it lies in a buffer."""
        lent = self.channels is not None and self.channels.is_buffer(tensor)
        return tensor.detach().clone() if lent else tensor

    def _end(self, action: Action) -> None:
        self._give_back(action.stage, action.microbatch)
        if action.microbatch == self.parts.last_backward and self.on_last_backward is not None:
            self.on_last_backward(action.stage)

    def _give_back(self, number: int, microbatch: int) -> None:
        for arrival in self._borrowed.pop((number, microbatch), ()):
            assert self.channels is not None
            self.channels.release(arrival)


def _make_own(fresh: list[nn.Parameter], *messages: Tensor | None) -> list[nn.Parameter]:
    """Copy new gradients that share memory with a message; return the parameters that still have no gradient.

    Without the copy, a later message could overwrite the gradient, or accumulation could change a message being sent.
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
    inputs: Tensor,
    targets: Tensor | None,
    most: int,
    connections: Connections | None,
    *,
    tokens: Sequence[int] = (),
    evaluates: bool = False,
) -> BatchParts:
    """Cut a batch into `most` micro-batches, or one per sample if there are fewer. All ranks must pass equal shapes.

    With `tokens`, cut each micro-batch further into slices of these lengths along dimension 1.

    Raises:
        TypeError: If inputs or targets are not tensors.
        ValueError: If the batch is empty, the numbers of inputs and targets differ, inputs require a gradient, the
        ranks' batches differ in shape, or the lengths of the slices do not add up to the sequence length.
        RuntimeError: If autograd is in inference mode.
    """
    _check(inputs, targets, evaluates=evaluates)
    lengths = part_lengths(len(inputs), most)
    kind = (tuple(inputs.shape[1:]), inputs.dtype, evaluates)
    if connections is not None:
        in_words = f"{len(inputs)} samples of shape {kind[0]}, {inputs.dtype}"
        connections.compare([len(inputs), zlib.crc32(repr(kind).encode())], in_words)
    if tokens:
        _check_slices(inputs, targets, tokens)
    own, of_targets = (
        () if each is None else _sliced(torch.split(each, lengths), tokens) for each in (inputs, targets)
    )
    samples = [length * each / sum(tokens) for length in lengths for each in tokens] if tokens else lengths
    forms: list[Form] = [(length, each, *kind) for length in lengths for each in tokens or (None,)]
    weights = [each / len(inputs) for each in samples]
    return BatchParts(own, of_targets, samples, weights, forms, len(weights) - max(1, len(tokens)))


def _sliced(parts: Sequence[Tensor], tokens: Sequence[int]) -> Sequence[Tensor]:
    """Cut every micro-batch (samples, tokens, ...) into slices, if `tokens` is given."""
    return [each for part in parts for each in torch.split(part, list(tokens), dim=1)] if tokens else parts


def _check_slices(inputs: Tensor, targets: Tensor | None, tokens: Sequence[int]) -> None:
    for what, each in (("inputs", inputs), ("targets", inputs if targets is None else targets)):
        if each.dim() < 2 or each.shape[1] != sum(tokens):
            raise ValueError(
                f"{what} have shape {tuple(each.shape)}, but the slices {', '.join(map(str, tokens))} need "
                f"(samples, {sum(tokens)}, ...); change the lengths of the slices or of the sequences"
            )


def _check(inputs: Tensor, targets: Tensor | None, *, evaluates: bool) -> None:
    """Refuse arguments with which a step or an evaluation cannot run."""
    for what, each in (("inputs", inputs), ("targets", inputs if evaluates else targets)):
        if not isinstance(each, Tensor):
            raise TypeError(f"{what}: got a {type(each).__name__}; pass one tensor, with samples in dimension 0")
    if not inputs.dim() or not len(inputs):
        raise ValueError("a batch of 0 samples; pass at least one")
    if targets is not None and len(targets) != len(inputs):
        raise ValueError(f"{len(inputs)} inputs but {len(targets)} targets; pass one target per input")
    if inputs.requires_grad:
        raise ValueError("inputs require a gradient, which a pipeline does not return; pass inputs.detach()")
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "a pipeline cannot run within torch.inference_mode(); call it outside: evaluate() builds no graph anyway"
        )
