"""A pipeline over the ranks of a group: each holds some stages of a model, and does its row of a schedule.

    pipeline = Pipeline(layers, schedule("1f1b", 4, 8), loss=cross_entropy)
    optimizer = SGD(pipeline.module.parameters(), lr=0.1)
    loss = pipeline.step(inputs, targets)                # gradients are those of a loop, bit for bit
    optimizer.step()

The loop, in one process: for every part of the batch, in order,

    loss = loss_of(model(part_inputs), part_targets);  (loss * (samples of the part / samples)).backward()

Weights that several stages have get the same sum in another order, on each of their ranks, unless it is `exact`
(`pipe/ties.py`). Where a stage raises, all ranks end with that as the cause, and the pipeline cannot be
used again (`pipe/wires/failures.py`).
"""

import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.pipe.draws import Hooks
from muster.pipe.graphs import Graphs, graphs_for
from muster.pipe.marks import Mark, marks_for
from muster.pipe.passages import PASSAGES
from muster.pipe.run import Held, Parts, Row, Run, check_model, cut_batch, device_of, evaluating, row_of
from muster.pipe.schedules import cuts as cutting
from muster.pipe.schedules.actions import Schedule
from muster.pipe.schedules.programs import Span, Step
from muster.pipe.splitting.halves import WeightQueue
from muster.pipe.stage import Loss, Make, Stage
from muster.pipe.ties import Tied, Ties, find_ties
from muster.pipe.together import Place, Together
from muster.pipe.wires.channels import Channels
from muster.pipe.wires.meeting import meet
from muster.zero.agreement import require_same

Result = TypeVar("Result")


class Pipeline:
    """This rank's stages of a model of layers, and the step that all ranks of a group do together.

    Building one is a collective. Every rank passes the whole model, of which it keeps its layers in `module`, and the
    same settings; only weights that several ranks have are made equal. `loss` is the mean over a micro-batch, of the
    model's output and targets. `cuts` are the first layers of stages (`pipe.schedules.cuts`), by default even ones.

    `recompute` keeps only the inputs of stages from forward to backward, `layerwise` those of layers, of which one at
    a time is then forwarded again and taken back; second forwards read buffers as the first did (`pipe/buffers.py`).
    `exact` keeps a loop's bits where a schedule splits backwards and where stages share a weight. `cuda_graphs` records
    forwards and backwards and replays them (`pipe/graphs.py`).

    A layer that works in place on what another stage has made gets a copy: its first forward shows whether it does.
    Layers stay those that were passed; a buffer that several ranks have is each one's own from then on. Batch norms
    normalize each micro-batch by itself, and update running statistics by one after the other. Layers draw other random
    numbers than in a loop, unless `hooks.seeds` are set. Gradients may be sparse (of embeddings); that of a weight that
    several ranks have becomes dense. What crosses a cut and does not fill its memory, as what is expanded, arrives as a
    dense copy, which kernels of 16-bit types may round otherwise.

    Between steps weights may be loaded, replaced, frozen or, before the first step, cast to another type, on all ranks
    alike; one that several stages have is copied into, not replaced. `module.compile()` compiles layers where they are.
    A deep copy of `module`, as for an average of weights, has plain layers, whatever the schedule.

    A rank that needs nothing more of the others has ended its step when one of them fails later, and hears of it in the
    next: to hear of it at once it would have to wait in every step until the slowest has ended. Over NCCL a rank whose
    host waits for its GPU within a layer hears of it by NCCL's own time-out.

    Raises:
        TypeError: the model is no `nn.Sequential`.
        ValueError: more stages than layers, a group of another size than the schedule's, settings that differ between
            ranks or do not go together, or a parameter that belongs to no layer.
        ScheduleError: the schedule cannot be run.
    """

    loss_sum: Tensor | None = None  # of the last step, over its samples
    _running: Run | None = None  # between the begin and the end of a row

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
        self.module = Held(held)
        self._device = device_of(self.module, layers)
        self._marks = marks_for(self._device)
        self._rows: dict[tuple[int, bool], Row] = {}
        self._row(schedule.microbatches)  # refuses a schedule that cannot be run
        self._make: Make = PASSAGES["layerwise" if layerwise else "recompute" if recompute else "whole"]
        self._graphs: Graphs | None = None
        if cuda_graphs:
            own = self.stages.values()
            self._graphs = graphs_for(own, self.hooks, self._device, layerwise=layerwise, recompute=recompute)
            self._make = self._graphs.make

        ties = find_ties(layers, lengths, schedule.rank_of, self.rank)
        self._meeting = meet(process_group, self._device, _peers(schedule, self.rank, ties))
        self._channels: Channels | None = None
        self._together = Together(self._meeting)
        self._ties = Ties(ties, self._meeting, self.rank, _use_of(self) if exact else None)
        if self._meeting is not None:
            how = f"cuts {bounds}, layerwise {layerwise}, recompute {recompute}, exact {exact}"
            require_same([str(schedule), how, *(name for name, _ in named)], self._meeting.group, "pipelines")
            self._channels = Channels(self._meeting.wire, self._meeting.control, self._device, schedule.microbatches)
            self._ties.share_weights()
        self.queue = WeightQueue(self.module, exact=exact) if schedule.splits_backward else None
        if self._graphs is not None:
            self._graphs.queue = self.queue

    @property
    def spans(self) -> list[Span]:
        """What this rank did in the last step, first to last, by `time.monotonic()`; to read them waits for a GPU.

        Work, sends, and waits for what is received. On a GPU they are its computing stream's: a wait is the time in
        which that had nothing else to do.
        """
        if self._spans is None:
            times = self._marks.seconds([mark for _, *both in self._marked for mark in both])
            every = zip(self._marked, times[::2], times[1::2], strict=True)
            self._spans = [Span(step, start_s, end_s) for (step, *_), start_s, end_s in every]
            self._marked = []
        return self._spans

    @property
    def tied(self) -> dict[str, str]:
        """Map names of this rank's parameters that an earlier rank has too to the names there."""
        return dict(self._ties.names())

    @property
    def in_last_backward(self) -> bool:
        """True while this rank takes a stage's last micro-batch back: a gradient that was added to is whole then."""
        run = self._running
        return (
            run is not None
            and run.at is not None
            and run.at.kind != "F"
            and run.at.microbatch == len(run.parts.weights) - 1
        )

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward a batch; return its mean loss, a float64 scalar, the same on every rank.

        Every rank passes tensors of the same shapes, samples first; the first stage's reads inputs, the last one's
        targets. The batch is cut into as many parts as the schedule has micro-batches, of lengths that differ by one at
        most, larger ones first; fewer where there are fewer samples. Gradients are added to `.grad`.

        Raises:
            TypeError: inputs or targets are no tensors.
            ValueError: no samples, inputs and targets of different numbers, other ones than another rank's, inputs that
                require a gradient, activations that are not like those of before.
            StageFailedError: another rank's stage failed.
            Exception: what a stage of this rank raised.
        """
        return self._guarded(lambda: self._step(inputs, targets))

    def evaluate(self, inputs: Tensor) -> Tensor:
        """Run the model in evaluation mode; return the outputs of the whole batch on every rank.

        It is cut as a step cuts it. Raises as `step` does.
        """
        return self._guarded(lambda: self._evaluate(inputs))

    def __reduce__(self) -> Any:
        raise TypeError("a pipeline holds connections: it cannot be copied or pickled; copy its module, or state dict")

    def _step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        parts = cut_batch(inputs, targets, self.schedule.microbatches, self._meeting)
        if self._graphs is not None:
            self._graphs.begin()
        run = Run(self.stages, self.schedule.stages - 1, self._channels, self._make, self.queue)
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
        self.loss_sum = self._meeting.tell_all(total, self.schedule.rank_of[-1]) if self._meeting else total
        self._ties.sum_gradients()
        return self.loss_sum / len(inputs)

    def _evaluate(self, inputs: Tensor) -> Tensor:
        parts = cut_batch(inputs, None, self.schedule.microbatches, self._meeting, evaluates=True)
        run = Run(self.stages, self.schedule.stages - 1, self._channels, None, None)
        with evaluating(self.module), torch.no_grad():
            self._do(run, self._row(len(parts.weights), forwards_only=True), parts)
        outputs = torch.cat([run.results[index] for index in range(len(run.results))]) if run.results else None
        if self._meeting is not None:
            outputs = self._meeting.deal(outputs, self.schedule.rank_of[-1])
        assert outputs is not None
        return outputs

    def _do(self, run: Run, row: Row, parts: Parts) -> None:
        """Do all of a row, as all other ranks do."""
        first = next(self.module.parameters(), None)
        if first is not None and first.device != self._device:
            raise ValueError(
                f"layers are on {first.device}, the pipeline was built for {self._device}; move them before it is built"
            )
        if self._meeting is not None:
            self._meeting.wire.expect(row.backlogs)
        self._running = run
        run.run(row, parts)
        self._running = None  # not where it raises: who asks what failed looks there
        if self._meeting is not None:
            self._meeting.agree()
        if self._channels is not None:
            self._channels.finish()
        if self._meeting is not None:
            self._meeting.wire.expect({})

    def _row(self, microbatches: int, *, forwards_only: bool = False) -> Row:
        key = (microbatches, forwards_only)
        if key not in self._rows:
            self._rows[key] = row_of(self.schedule, self.rank, microbatches, forwards_only=forwards_only)
        return self._rows[key]

    def _guarded(self, work: Callable[[], Result]) -> Result:
        """Do something that needs all ranks; what is left of a step that failed goes."""
        try:
            return self._together.do(work, self._place)
        except BaseException:
            self._running = None
            if self.queue is not None:
                self.queue.discard()
            raise

    def _place(self) -> Place | None:
        """Tell what this rank works on."""
        if self._running is None or self._running.at is None:
            return None
        at = self._running.at
        names = self.stages[at.stage].names
        return Place(at.stage, f"layers {names[0]!r} to {names[-1]!r}, at {at} of {self.schedule.name}")


def _use_of(pipeline: Pipeline) -> Callable[[], tuple[int, int]]:
    """Return what tells the stage and the micro-batch that a rank works on."""
    living = weakref.ref(pipeline)

    def use() -> tuple[int, int]:
        found = living()
        at = found._running.at if found is not None and found._running is not None else None
        assert at is not None
        return at.stage, at.microbatch

    return use


def _peers(schedule: Schedule, rank: int, ties: Sequence[Tied]) -> set[int]:
    """Return the ranks that this one exchanges activations, gradients or tied weights with."""
    neighbours = {frozenset(pair) for pair in pairwise(schedule.rank_of)} | {frozenset(each.ranks) for each in ties}
    return {peer for each in neighbours if rank in each for peer in each} - {rank}
