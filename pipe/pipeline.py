"""A pipeline over the ranks of a group: each rank holds some stages of a model, and runs its row of a schedule.

    pipeline = Pipeline(layers, schedule("1f1b", 4, 8), loss=cross_entropy)
    optimizer = SGD(pipeline.module.parameters(), lr=0.1)
    loss = pipeline.step(inputs, targets)                # gradients equal those of the loop below, bit for bit
    optimizer.step()

The loop, in one process, over the parts of the batch in order:

    loss = loss_of(model(part_inputs), part_targets);  (loss * (samples of the part / samples)).backward()

The gradient of a weight shared by several stages is the same sum in another order, unless `exact` is set
(`pipe/ties.py`). If a stage raises, every rank fails with that cause, and the pipeline cannot be used again
(`pipe/wires/failures.py`).
"""

import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.pipe.failure_guard import FailureGuard, Position
from muster.pipe.graphs import Graphs, graphs_for
from muster.pipe.marks import Mark, marks_for
from muster.pipe.microbatch_passes import PASSES
from muster.pipe.rng_streams import Hooks
from muster.pipe.run import (
    BatchParts,
    RankRow,
    RowExecution,
    StageLayers,
    check_model,
    cut_batch,
    device_of,
    evaluating,
    row_of,
)
from muster.pipe.schedules import cuts as cutting
from muster.pipe.schedules.actions import Schedule
from muster.pipe.schedules.programs import Span, Step
from muster.pipe.splitting.halves import WeightQueue
from muster.pipe.stage import Loss, Make, Stage
from muster.pipe.ties import TiedWeight, Ties, find_ties
from muster.pipe.wires.channels import Channels
from muster.pipe.wires.connections import connect
from muster.zero.agreement import require_same

Result = TypeVar("Result")


class Pipeline:
    """This rank's stages of a layered model, and the training step that all ranks of a group run together.

    Building a pipeline is a collective. Every rank passes the whole model and the same settings; its own layers are
    then in `module`. Only weights held by several ranks are made equal. `loss` maps the model's output and the targets
    of a micro-batch to their mean loss. `cuts` are the first layers of the stages (`pipe.schedules.cuts`), even by
    default.

    `recompute` keeps only the inputs of stages between forward and backward. `layerwise` keeps the inputs of layers;
    the backward recomputes one layer at a time. A second forward reads buffers as the first did (`pipe/buffers.py`).
    `exact` reproduces a loop's bits also where a schedule splits backwards and where stages share a weight.
    `cuda_graphs` records forwards and backwards and replays them (`pipe/graphs.py`).

    A layer that overwrites the output of another stage gets a copy; its first forward shows whether it does. The
    layers are used as passed, not copied. A buffer shared by several ranks becomes separate on each. Batch norms
    normalize each micro-batch separately and update their running statistics in turn. Without `hooks.seeds`, layers
    draw other random numbers than in a loop. Gradients may be sparse (embeddings), but those of weights on several
    ranks become dense. A tensor at a cut that does not fill its memory, such as an expanded one, arrives as a dense
    copy; 16-bit kernels may round it differently.

    Between steps, weights may be loaded, replaced or frozen, and cast before the first step, if all ranks do the same.
    Copy into a weight shared by several stages instead of replacing it. `module.compile()` compiles the layers in
    place. A deep copy of `module`, for example to average weights, has plain layers, whatever the schedule.

    A rank that needs nothing more from the others ends its step. If another rank then fails, this rank raises in its
    next step: raising at once would require waiting for the slowest rank in every step. Over NCCL, a rank whose host
    waits for its GPU within a layer only fails when NCCL times out.

    Raises:
        TypeError: If the model is not an `nn.Sequential`.
        ValueError: If there are more stages than layers, the group and the schedule differ in size, settings differ
            between ranks or contradict each other, or a parameter belongs to no layer.
        ScheduleError: If the schedule cannot be run.
    """

    loss_sum: Tensor | None = None  # summed over the samples of the last step
    _running: RowExecution | None = None  # set while a row is running

    def __init__(
        self,
        layers: nn.Sequential,
        schedule: Schedule,
        *,
        loss: Loss,
        cuts: Sequence[int] | None = None,
        process_group: dist.ProcessGroup | None = None,
        layerwise: bool = False,
        recompute: bool = False,
        exact: bool = False,
        cuda_graphs: bool = False,
    ) -> None:
        check_model(layers, process_group, schedule, loss, layerwise=layerwise, recompute=recompute)
        named = [(name, layer) for name, layer in layers._modules.items() if layer is not None]
        count, stages = len(named), schedule.stages
        bounds = cutting.even(count, stages) if cuts is None else cutting.by_hand(cuts, count, stages)
        self.schedule, self.cuts, self.hooks = schedule, bounds, Hooks()
        self.on_last_backward: Callable[[int], None] | None = None  # (stage), when its gradients are complete
        self._spans: list[Span] | None = []
        self._marked: list[tuple[Step, Mark, Mark]] = []

        self.rank = dist.get_rank(process_group) if dist.is_initialized() else 0
        lengths, splits = cutting.lengths(bounds, count), schedule.splits_backward
        self.stages = {
            stage: Stage(stage, begin, named[begin : begin + lengths[stage]], self.hooks, splits=splits)
            for stage, begin in enumerate(bounds)
            if schedule.rank_of[stage] == self.rank
        }
        if (last := self.stages.get(stages - 1)) is not None:
            last.loss = loss
        held = [each for stage in self.stages.values() for each in zip(stage.names, stage.layers, strict=True)]
        self.module = StageLayers(held)
        self._device = device_of(self.module, layers)
        self._marks = marks_for(self._device)
        self._rows: dict[tuple[int, bool], RankRow] = {}
        self._row(schedule.microbatches)  # refuses a schedule that cannot be run
        self._make: Make = PASSES["layerwise" if layerwise else "recompute" if recompute else "whole"]
        self._graphs: Graphs | None = None
        if cuda_graphs:
            own = self.stages.values()
            self._graphs = graphs_for(own, self.hooks, self._device, layerwise=layerwise, recompute=recompute)
            self._make = self._graphs.make

        ties = find_ties(layers, lengths, schedule.rank_of, self.rank)
        self._connections = connect(process_group, self._device, _peers(schedule, self.rank, ties))
        self._channels: Channels | None = None
        self._guard = FailureGuard(self._connections)
        self._ties = Ties(ties, self._connections, self.rank, _use_of(self) if exact else None)
        if self._connections is not None:
            how = f"cuts {bounds}, layerwise {layerwise}, recompute {recompute}, exact {exact}"
            require_same([str(schedule), how, *(name for name, _ in named)], self._connections.group, "pipelines")
            self._channels = Channels(
                self._connections.wire, self._connections.control, self._device, schedule.microbatches
            )
            self._ties.share_weights()
        self.queue = WeightQueue(self.module, exact=exact) if schedule.splits_backward else None
        if self._graphs is not None:
            self._graphs.queue = self.queue

    @property
    def spans(self) -> list[Span]:
        """What this rank did in the last step, first to last, by `time.monotonic()`. Reading it waits for a GPU.

        The spans are actions, sends, and waits for messages. On a GPU they are measured on the compute stream: a wait
        is time in which that stream was idle.
        """
        if self._spans is None:
            times = self._marks.seconds([mark for _, *both in self._marked for mark in both])
            every = zip(self._marked, times[::2], times[1::2], strict=True)
            self._spans = [Span(step, start_s, end_s) for (step, *_), start_s, end_s in every]
            self._marked = []
        return self._spans

    @property
    def tied(self) -> dict[str, str]:
        """Map the names of this rank's parameters that an earlier rank also holds to their names there."""
        return dict(self._ties.names())

    @property
    def in_last_backward(self) -> bool:
        """True while this rank runs the backward of a stage's last micro-batch, which completes its gradients."""
        run = self._running
        return (
            run is not None
            and run.at is not None
            and run.at.kind != "F"
            and run.at.microbatch == len(run.parts.weights) - 1
        )

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward of a batch; return its mean loss, a float64 scalar, the same on every rank.

        Every rank passes tensors of the same shapes, with samples in the first dimension. Only the first stage reads
        inputs, only the last one targets. The batch is cut into the schedule's number of micro-batches, or one per
        sample if there are fewer. Their lengths differ by at most one, longer parts first. Gradients are added to
        `.grad`.

        Raises:
            TypeError: If inputs or targets are not tensors.
            ValueError: If the batch is empty, the numbers of inputs and targets differ, ranks pass different shapes,
                inputs require a gradient, or the shape of an activation changes.
            StageFailedError: If another rank's stage failed.
            Exception: Whatever a stage of this rank raised.
        """
        return self._guarded(lambda: self._step(inputs, targets))

    def evaluate(self, inputs: Tensor) -> Tensor:
        """Run the model in evaluation mode; return the outputs of the whole batch on every rank.

        The batch is cut as in `step`. Raises as `step` does.
        """
        return self._guarded(lambda: self._evaluate(inputs))

    def __reduce__(self) -> Any:
        raise TypeError("a pipeline holds connections and cannot be copied or pickled; copy its module or state dict")

    def _step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        parts = cut_batch(inputs, targets, self.schedule.microbatches, self._connections)
        if self._graphs is not None:
            self._graphs.begin()
        run = RowExecution(self.stages, self.schedule.stages - 1, self._channels, self._make, self.queue)
        run.on_last_backward, run.now = self.on_last_backward, self._marks.now
        self._marked, self._spans = run.marked, None
        self._ties.begin(len(parts.weights))
        with torch.enable_grad():
            self._do(run, self._row(len(parts.weights)), parts)
        if self.queue is not None:
            self.queue.finish()
        if self._graphs is not None:
            self._graphs.end()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if run.results:
            for index, part in enumerate(parts.inputs):
                total += run.results[index].double() * len(part)
        self.loss_sum = (
            self._connections.broadcast_scalar(total, self.schedule.rank_of[-1]) if self._connections else total
        )
        self._ties.sum_gradients()
        return self.loss_sum / len(inputs)

    def _evaluate(self, inputs: Tensor) -> Tensor:
        parts = cut_batch(inputs, None, self.schedule.microbatches, self._connections, evaluates=True)
        run = RowExecution(self.stages, self.schedule.stages - 1, self._channels, None, None)
        with evaluating(self.module), torch.no_grad():
            self._do(run, self._row(len(parts.weights), forwards_only=True), parts)
        outputs = torch.cat([run.results[index] for index in range(len(run.results))]) if run.results else None
        if self._connections is not None:
            outputs = self._connections.broadcast_tensor(outputs, self.schedule.rank_of[-1])
        assert outputs is not None
        return outputs

    def _do(self, run: RowExecution, row: RankRow, parts: BatchParts) -> None:
        """Run a row together with all other ranks."""
        first = next(self.module.parameters(), None)
        if first is not None and first.device != self._device:
            raise ValueError(
                f"layers are on {first.device}, the pipeline was built for {self._device}; move them before building it"
            )
        if self._connections is not None:
            self._connections.wire.expect(row.backlogs)
        self._running = run
        run.run(row, parts)
        self._running = None  # kept if the row raises: `_position` reads it for the error message
        if self._connections is not None:
            self._connections.agree()
        if self._channels is not None:
            self._channels.finish()
        if self._connections is not None:
            self._connections.wire.expect({})

    def _row(self, microbatches: int, *, forwards_only: bool = False) -> RankRow:
        key = (microbatches, forwards_only)
        if key not in self._rows:
            self._rows[key] = row_of(self.schedule, self.rank, microbatches, forwards_only=forwards_only)
        return self._rows[key]

    def _guarded(self, work: Callable[[], Result]) -> Result:
        """Run an operation that needs all ranks; clean up if it fails."""
        try:
            return self._guard.do(work, self._position)
        except BaseException:
            self._running = None
            if self.queue is not None:
                self.queue.discard()
            raise

    def _position(self) -> Position | None:
        """Return what this rank is working on, or None between steps."""
        if self._running is None or self._running.at is None:
            return None
        at = self._running.at
        names = self.stages[at.stage].names
        return Position(at.stage, f"layers {names[0]!r} to {names[-1]!r}, at {at} of {self.schedule.name}")


def _use_of(pipeline: Pipeline) -> Callable[[], tuple[int, int]]:
    """Return a function that reads the stage and micro-batch this rank is working on."""
    living = weakref.ref(pipeline)

    def use() -> tuple[int, int]:
        found = living()
        at = found._running.at if found is not None and found._running is not None else None
        assert at is not None
        return at.stage, at.microbatch

    return use


def _peers(schedule: Schedule, rank: int, ties: Sequence[TiedWeight]) -> set[int]:
    """Return the ranks with which this one exchanges activations, gradients or tied weights."""
    neighbours = {frozenset(pair) for pair in pairwise(schedule.rank_of)} | {frozenset(each.ranks) for each in ties}
    return {peer for each in neighbours if rank in each for peer in each} - {rank}
