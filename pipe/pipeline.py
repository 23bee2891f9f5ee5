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
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.pipe.clipping import clip
from muster.pipe.failure_guard import FailureGuard, Position
from muster.pipe.graphs import When, graphs_for
from muster.pipe.marks import Mark, marks_for
from muster.pipe.microbatch_passes import RecomputedPass, WholeGraphPass
from muster.pipe.rng_streams import Hooks
from muster.pipe.run import (
    BatchParts,
    RankOperations,
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
from muster.pipe.schedules.programs import Step, StepSpan
from muster.pipe.splitting.halves import WeightQueue
from muster.pipe.stage import Loss, Make, Stage
from muster.pipe.ties import TiedWeight, Ties, find_ties
from muster.pipe.token_slices import SlicedPasses, check_slices
from muster.pipe.weighing import factor_of, multiply
from muster.pipe.wires.channels import Channels
from muster.pipe.wires.connections import connect
from muster.zero.agreement import require_same

Result = TypeVar("Result")


class Pipeline:
    """This rank's stages of a layered model, and the training step that all ranks of a group run together.

    Building a pipeline is a collective. Every rank passes the whole model and the same settings; `module` then
    contains this rank's layers. A weight on several ranks gets the first rank's values; no other weight is
    synchronized. `loss` maps the model's output and the targets of a micro-batch to their mean loss. `cuts` lists the
    first layer of each stage (`pipe.schedules.cuts`); by default the layers are divided evenly.

    If some targets do not count, such as padding, let `loss` return (sum, count): the sum of the losses, and the number
    of targets that count (a scalar tensor or a number). Loss and gradients are then those of the mean over the whole
    batch's targets that count, and zero if there are none. Gradients are divided at the end of `step`. torch's own
    `cross_entropy`, `nll_loss`, and their modules without class weights, are counted without this. Any other mean
    counts in proportion to its samples, so micro-batches with unequal padding give the mean of means.

    `recompute` keeps only the inputs of stages between forward and backward. The second forward reads the buffer values
    of the first (`pipe/buffers.py`). `exact` gives the bits of the loop even if the schedule splits backwards or stages
    share a weight. `cuda_graphs` records forwards and backwards and replays them (`pipe/graphs.py`); "auto" does so on
    a GPU if it can, and `graphs.off` has the reason if not.

    A layer that overwrites its input gets a copy of it if the input is the output of another stage. The first forward
    detects such layers. The layers are used as passed, not copied. A buffer shared by several ranks is not
    synchronized. Batch norms normalize each micro-batch separately and update their running statistics after each.
    Without `hooks.seeds`, layers draw different random numbers than in the loop. Gradients may be sparse (embeddings),
    but those of weights on several ranks become dense. If the elements of a tensor at a cut have gaps or overlap in
    memory, as after `expand`, the next stage gets a dense copy. 16-bit kernels may round differently for the copy.

    Weights may be loaded, replaced or frozen between steps, and also cast before the first step. All ranks must make
    the same changes. A weight shared by several stages cannot be replaced: copy new values into it. `module.compile()`
    compiles the layers in place. A deep copy of `module`, for example to average weights, has plain layers, whatever
    the schedule.

    A rank ends its step when it needs no more messages from other ranks. If another rank then fails, this rank raises
    in its
    next step: raising at once would require waiting for the slowest rank in every step. With NCCL, if a layer makes the
    host wait for the GPU when another rank fails, this rank fails only when NCCL times out.

    Raises:
        TypeError: If the model is not an `nn.Sequential`.
        ValueError: If there are more stages than layers, the group and the schedule differ in size, settings differ
            between ranks or contradict each other, or a parameter belongs to no layer.
        ScheduleError: If the schedule cannot be run.
    """

    loss_sum: Tensor | None = None  # summed over the samples of the last step; see `divides`
    divides = True  # False: with (sum, count), the caller multiplies loss and gradients by `targets / counted`
    counted: Tensor | None = None  # (2,): the last batch's targets that count, and all its targets; 0: not known
    _counts: bool | None = None  # True: the loss returns (sum, count); None before the first step
    _running: RowExecution | None = None  # the step or evaluation in progress

    def __init__(
        self,
        layers: nn.Sequential,
        schedule: Schedule,
        *,
        loss: Loss,
        cuts: Sequence[int] | None = None,
        process_group: dist.ProcessGroup | None = None,
        recompute: bool = False,
        exact: bool = False,
        cuda_graphs: When = False,
        tokens: Sequence[int] = (),
    ) -> None:
        check_model(layers, process_group, schedule)
        self.tokens = tuple(tokens)
        check_slices(schedule, self.tokens, others=recompute or exact or bool(cuda_graphs))
        named = [(name, layer) for name, layer in layers._modules.items() if layer is not None]
        count, stages = len(named), schedule.stages
        bounds = cutting.even(count, stages) if cuts is None else cutting.by_hand(cuts, count, stages)
        self.schedule, self.cuts, self.hooks = schedule, bounds, Hooks()
        self.on_last_backward: Callable[[int], None] | None = None  # called with a stage after its last backward
        self._spans: list[StepSpan] | None = []
        self._marked: list[tuple[Step, Mark, Mark]] = []

        self.rank = dist.get_rank(process_group) if dist.is_initialized() else 0
        lengths = cutting.lengths(bounds, count)
        self.stages = self._own_stages(named, lengths)
        if (last := self.stages.get(stages - 1)) is not None:
            last.loss = loss
        held = [each for stage in self.stages.values() for each in zip(stage.names, stage.layers, strict=True)]
        self.module = StageLayers(held)
        self._device = device_of(self.module, layers)
        self._marks = marks_for(self._device)
        self._rows: dict[tuple[int, bool], RankOperations] = {}
        self._row(schedule.microbatches)  # raises if the schedule cannot be run
        self._make: Make = RecomputedPass if recompute else WholeGraphPass
        if self.tokens:
            self._make = SlicedPasses(self.tokens).make
        self.graphs = graphs_for(self.stages.values(), self.hooks, self._device, when=cuda_graphs, recompute=recompute)
        if self.graphs is not None:
            self._make = self.graphs.make

        ties = find_ties(layers, lengths, schedule.rank_of, self.rank)
        self._connections = connect(process_group, self._device, _peers(schedule, self.rank, ties))
        self._channels: Channels | None = None
        self._guard = FailureGuard(self._connections)
        self._ties = Ties(ties, self._connections, self.rank, _use_of(self) if exact else None)
        if self._connections is not None:
            how = f"cuts {bounds}, recompute {recompute}, exact {exact}, tokens {self.tokens}"
            require_same([str(schedule), how, *(name for name, _ in named)], self._connections.group, "pipelines")
            self._channels = Channels(
                self._connections.wire, self._connections.control, self._device, schedule.microbatches
            )
            self._ties.share_weights()
        self.queue = WeightQueue(self.module, exact=exact) if schedule.splits_backward else None
        if self.graphs is not None:
            self.graphs.queue = self.queue

    def _own_stages(self, named: Sequence[tuple[str, nn.Module]], lengths: Sequence[int]) -> dict[int, Stage]:
        """Return this rank's stages of the named layers, by number."""
        return {
            stage: Stage(stage, begin, named[begin : begin + lengths[stage]], self.hooks)
            for stage, begin in enumerate(self.cuts)
            if self.schedule.rank_of[stage] == self.rank
        }

    @property
    def spans(self) -> list[StepSpan]:
        """The spans of this rank in the last step, in order, by `time.monotonic()`. Reading them waits for a GPU.

        The spans are actions, sends, and waits for messages. On a GPU they are measured on the compute stream: a wait
        is time in which that stream was idle.
        """
        if self._spans is None:
            times = self._marks.seconds([mark for _, *both in self._marked for mark in both])
            every = zip(self._marked, times[::2], times[1::2], strict=True)
            self._spans = [StepSpan(step, start_s, end_s) for (step, *_), start_s, end_s in every]
            self._marked = []
        return self._spans

    @property
    def tied(self) -> dict[str, str]:
        """This rank's names of parameters that an earlier rank also holds, mapped to the names at their first use."""
        return dict(self._ties.names())

    @property
    def in_last_backward(self) -> bool:
        """True while this rank runs the backward of a stage's last micro-batch, which completes its gradients."""
        run = self._running
        return (
            run is not None
            and run.at is not None
            and run.at.kind != "F"
            and run.at.microbatch == run.parts.last_backward
        )

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward of a batch; return its mean loss, a float64 scalar, the same on every rank.

        Every rank passes tensors of the same shapes; the first dimension counts samples. Only the first stage reads
        inputs, only the last one targets. The batch is cut into the schedule's number of micro-batches, or one per
        sample if there are fewer. Their lengths differ by at most one, longer parts first. Gradients are added to
        `.grad`.

        Raises:
            TypeError: If inputs or targets are not tensors.
            ValueError: If the batch is empty, the numbers of inputs and targets differ, ranks pass different shapes,
                inputs require a gradient, or the layout of an activation differs from earlier inputs of this shape.
            StageFailedError: If another rank's stage failed.
            Exception: The error of a stage of this rank, unchanged.
        """
        return self._guarded(lambda: self._step(inputs, targets))

    def evaluate(self, inputs: Tensor) -> Tensor:
        """Run the model in evaluation mode; return the outputs of the whole batch on every rank.

        The batch is cut as in `step`, so outputs equal those of a loop over the micro-batches bit for bit. One forward
        over the whole batch may round differently. Raises the same errors as `step`.
        """
        return self._guarded(lambda: self._evaluate(inputs))

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients of all stages so that their 2-norm over all ranks is at most `max_norm`; return the norm.

        Every rank of the pipeline must call this after `step`, and after gradients were averaged with other pipelines.
        A weight on several ranks counts once. As in `torch.nn.utils.clip_grad_norm_`, gradients of an infinite or NaN
        norm become zero or NaN. The bits of the norm do not depend on the cuts.

        Raises:
            ValueError: If `max_norm` is not a positive number, or a gradient is sparse.
            StageFailedError: If another rank failed.
        """
        if not max_norm > 0.0:
            raise ValueError(f"max_norm must be a positive number, got {max_norm!r}")
        return self._guarded(lambda: clip(self.module, self.tied, self._connections, max_norm))

    def abort(self) -> None:
        """End this rank's waits for messages of other ranks, from another thread. The pipeline cannot be used again."""
        if self._connections is not None:
            self._connections.wire.abort()

    def __reduce__(self) -> Any:
        raise TypeError("a pipeline holds connections and cannot be copied or pickled; copy its module or state dict")

    def _step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        count = self.schedule.microbatches // self.schedule.slices
        parts = cut_batch(inputs, targets, count, self._connections, tokens=self.tokens)
        if self.graphs is not None:
            self.graphs.begin()
        run = RowExecution(self.stages, self.schedule.stages - 1, self._channels, self._make, self.queue)
        run.on_last_backward, run.now = self.on_last_backward, self._marks.now
        self._marked, self._spans = run.marked, None
        before = {}  # gradients of earlier steps, which the count of this one does not divide
        if self.divides and self._counts is not False:
            before = {each: each.grad.clone() for each in self.module.parameters() if each.grad is not None}
        self._ties.begin(len(parts.weights))
        with torch.enable_grad():
            self._do(run, self._row(len(parts.weights)), parts)
        if self.queue is not None:
            self.queue.finish()
        if self.graphs is not None:
            self.graphs.end()
        numbers = self._sums(run, parts)
        if self._connections is not None:
            numbers = self._connections.broadcast_numbers(numbers, self.schedule.rank_of[-1])
        self.loss_sum, self.counted = numbers[0], numbers[1:]
        self._ties.sum_gradients()
        if self._counts is None:
            self._counts = bool(self.counted[1])
        if self._counts and self.divides:
            self._divide(before)
        return self.loss_sum / len(inputs)

    def _sums(self, run: RowExecution, parts: BatchParts) -> Tensor:
        """Return the sums of losses, of targets that count and of all targets, on the rank with the last stage."""
        numbers = torch.zeros(3, dtype=torch.float64, device=self._device)
        if run.results:
            for index, samples in enumerate(parts.samples):
                result = run.results[index].double()
                numbers[0] += (result[0] if result.dim() else result) * samples
                if result.dim():
                    numbers[1] += result[1]
                    numbers[2] += parts.targets[index].numel()
        return numbers

    def _divide(self, before: Mapping[nn.Parameter, Tensor]) -> None:
        """Divide the loss and the gradients of this step by the number of targets that count."""
        assert self.counted is not None
        assert self.loss_sum is not None
        factor = factor_of(*self.counted)
        self.loss_sum = self.loss_sum * factor
        if (before or factor.device.type == "cpu") and factor == 1.0:  # the sum with earlier gradients keeps its bits
            return
        gradients = {each: each.grad for each in self.module.parameters() if each.grad is not None}
        for each, earlier in before.items():
            gradients[each] -= earlier
        multiply(gradients.values(), factor)
        for each, earlier in before.items():
            gradients[each] += earlier

    def _evaluate(self, inputs: Tensor) -> Tensor:
        count = self.schedule.microbatches // self.schedule.slices
        parts = cut_batch(inputs, None, count, self._connections, evaluates=True)
        run = RowExecution(self.stages, self.schedule.stages - 1, self._channels, None, None)
        with evaluating(self.module), torch.no_grad():
            self._do(run, self._row(len(parts.weights), forwards_only=True), parts)
        outputs = torch.cat([run.results[index] for index in range(len(run.results))]) if run.results else None
        if self._connections is not None:
            outputs = self._connections.broadcast_tensor(outputs, self.schedule.rank_of[-1])
        assert outputs is not None
        return outputs

    def _do(self, run: RowExecution, row: RankOperations, parts: BatchParts) -> None:
        """Run this rank's row, while all other ranks run theirs."""
        first = next(self.module.parameters(), None)
        if first is not None and first.device != self._device:
            raise ValueError(
                f"layers are on {first.device}, but the pipeline was built for {self._device}; move them before "
                "building it"
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

    def _row(self, microbatches: int, *, forwards_only: bool = False) -> RankOperations:
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
        """Return this rank's current stage and action, or None between steps."""
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
