"""One training step on one rank: forward and backward, averaging of gradients, clipping, optimizer step.

batch ─ parallel.Accumulation, or parallel.Stages ─ mean over ranks with the same layers ─ clip by the norm ─ step
        every layer is here      a slice of them                                           of the whole model
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

import torch
from torch import Tensor, nn

from muster.ddp.checks import some_of
from muster.jobs.basics.errors import RefusedError
from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.spec.recorded import AUTO, records, why_eager
from muster.jobs.tensors.parts import TensorPart
from muster.jobs.train.data.loading import ShardInput
from muster.jobs.train.graph import RECORDED, GraphedSteps, require_cuda, require_no_hooks
from muster.jobs.train.memory.held import Held, tensors_of
from muster.jobs.train.numerics import Numerics
from muster.jobs.train.numerics.weighing import weights_of
from muster.jobs.train.parallel.accumulate import Accumulation
from muster.jobs.train.parallel.parallelize import RankModel, groups_of, parallelize
from muster.jobs.train.profiling.clock import StepMarks
from muster.jobs.world.world import World

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings

UNUSED: Final = "find_unused_parameters"
NO_GRADIENT: Final = re.compile("[^;]+ got no gradient [^;]+")
NUMBERS: Final = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")

T = TypeVar("T")


class Engine:
    """A rank's part of a model, and its optimizer; runs training steps and predictions."""

    def __init__(self, model: RankModel, numerics: Numerics, settings: "TrainSettings", clock: StepMarks) -> None:
        self.model = model
        self.replica = model.replica
        self.stages = model.stages
        self.clock = clock
        self.scaler = numerics.scaler()
        if self.stages is not None:
            # Stages that finish early continue with the next step, unless all stages exchange values in every step.
            agrees = settings.precision == "fp16" or settings.non_finite == "skip"
            self.scaler.agrees = agrees or settings.clip_norm is not None
            self.stages.attach(self.replica, self.scaler, model.whole.aliases)
        self.clip_norm = settings.clip_norm
        self.same_norm = settings.same_norm
        self.runs = self.stages or Accumulation(self.replica, numerics, self.scaler, settings)
        self.weights = self.runs.weights = weights_of(settings, model.world.device, model.data_group)
        self.optimizer: torch.optim.Optimizer = self.replica.build_optimizer(numerics, settings)
        self.state = model.state(self.optimizer, self.scaler.state())
        self.before_update: Callable[[], None] | None = None  # raises if the mean gradients may be wrong
        # A pipeline records graphs of its actions, not of whole steps.
        self.graphed: GraphedSteps | None = None
        self._optional = settings.cuda_graph == AUTO
        self._eager = why_eager(settings) if self._optional and model.world.device.type == "cuda" else ""
        if records(settings, model.world.device.type) and self.stages is None:
            self.graphed = GraphedSteps(clock, model.world, optional=self._optional)
            self.replica.prepare_recording()

    @property
    def notice(self) -> str:
        """Whether steps are replayed from CUDA graphs, or why not; empty if the job does not ask for it."""
        graphs = self.graphed or (None if self.stages is None else self.stages.pipeline.graphs)
        off = self._eager if graphs is None else graphs.off
        if off:
            return f"cuda_graph: auto: steps run eagerly: {off}"
        if graphs is None:
            return ""
        return (
            RECORDED if self.graphed is not None else "cuda_graph: forwards and backwards are replayed from CUDA graphs"
        )

    @property
    def graph_bytes(self) -> int:
        """The memory that recorded graphs keep for themselves."""
        graphs = self.graphed or (None if self.stages is None else self.stages.pipeline.graphs)
        return 0 if graphs is None else graphs.bytes

    @property
    def not_timed(self) -> str:
        """The reason why timelines lack collectives of this rank's steps; empty if none are missing."""
        if self.graphed is not None and not self.graphed.off:
            return "no part of a step that is replayed from a CUDA graph can be timed; set cuda_graph: false to time it"
        return (
            "the exchanges within split layers are not timed" if self.model.world.tensor > 1 else self.replica.not_timed
        )

    @property
    def module(self) -> nn.Module:
        """This rank's layers."""
        return self.model.module

    def train_step(self, step: int, shards: Sequence[ShardInput]) -> list[Tensor]:
        """Train on this rank's part of a global batch.

        Returns a float64 scalar for each of this rank's virtual ranks: the sum of the losses of its samples.

        Raises:
            RefusedError: if the job does not allow unused parameters, but a parameter has no gradient.
        """
        with naming_the_key(self.module):
            return self.run(step, shards) if self.graphed is None else self.graphed.run(self, step, shards)

    # The step as a graph contains it: `graph.Recordable` ------------------------------------------------------------

    def run(self, step: int, shards: Sequence[ShardInput]) -> list[Tensor]:
        """Run a step eagerly."""
        losses = self.differentiate(step, shards)
        self.check()
        self.update()
        return losses

    def differentiate(self, step: int, shards: Sequence[ShardInput]) -> list[Tensor]:
        """Compute the mean gradients, clipped by the norm of the whole model's, each counted once; return the losses.

        This contains all collectives of the step that the update depends on.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if self.weights is not None:
            self.weights.begin()
        losses = self.runs.run(step, shards)
        gradients = self.replica.gradients()
        if self.weights is not None:
            losses = self.weights.divide(gradients, losses)
            self.clock.lap("communication")
        self.scaler.prepare(
            gradients,
            self.clip_norm,
            self.model.norm_group,
            exact=self.same_norm,
            counted=self.model.counted(),
        )
        return losses

    @property
    def is_checked(self) -> bool:
        """True if the host checks the mean gradients before the update."""
        return self.before_update is not None

    def check(self) -> None:
        """Check the mean gradients on the host, if the rank may outlive the ranks that computed them with it."""
        if self.before_update is not None:
            self.before_update()

    def update(self) -> None:
        """Step the optimizer."""
        self.scaler.advance(self.optimizer)
        self.clock.lap("optimizer")

    def seeds(self, step: int, shards: Sequence[ShardInput]) -> list[int]:
        """List the seeds of a step's forwards, in order."""
        assert isinstance(self.runs, Accumulation)
        return self.runs.seeds(step, shards)

    @contextmanager
    def seeded_by(self, seed: Callable[[int], None]) -> Iterator[None]:
        """Within the block, call `seed` with each of a step's seeds, instead of seeding the generators."""
        assert isinstance(self.runs, Accumulation)
        own, self.runs.seed = self.runs.seed, seed
        try:
            yield
        finally:
            self.runs.seed = own

    def replayed(self) -> None:
        """Record that a replay has stepped the optimizer."""
        self.replica.stepped()

    def abandon(self) -> None:
        """Clean up after a recording that failed: forget its gradients and collectives, none of which have run."""
        self.replica.abandon()
        self.optimizer.zero_grad(set_to_none=True)

    def predict(self, inputs: Tensor) -> Tensor:
        """Run the model in evaluation mode.

        All ranks must call this equally often, because a forward may be a collective.
        """
        self.module.eval()
        with torch.no_grad(), self.clock.muted():
            outputs = self.runs.predict(inputs)
        self.module.train()
        return outputs

    def with_room(self, work: Callable[[], T]) -> T:
        """Run work without collectives. If it runs out of memory, free recorded graphs and run it again.

        Before the next step, all ranks must call `agree_on_graphs`.
        """
        try:
            return work()
        except torch.OutOfMemoryError:
            why = "an evaluation needs the memory of the graph"
            if self.model.world.tensor > 1 or self.graphed is None or not self.graphed.make_room(why):
                raise
            return work()

    def cut(self) -> None:
        """Destroy this rank's graphs, also while a frame of an exception refers to them, and end a pipeline's messages.

        No step follows. Another thread than that of the steps may call this method.
        """
        if self.graphed is not None:
            self.graphed.end()
        if self.stages is not None:
            self.stages.pipeline.abort()

    def agree_on_graphs(self) -> None:
        """If a rank has freed its graphs, free those of all ranks: a collective."""
        if self.graphed is not None:
            self.graphed.agree()

    def held_state(self) -> list[TensorPart]:
        """List the parts that this rank saves. Together, the ranks save each part once."""
        return self.state.parts()

    def wanted_state(self, stored: Mapping[str, Piece]) -> list[TensorPart]:
        """List the parts to fill from a checkpoint's tensors. Must be called before the first step."""
        assert self.graphed is None or not self.graphed.recorded, "a recorded step would continue with the old state"
        return self.state.wanted(stored)

    def held_tensors(self) -> Held:
        """List the tensors of this rank by kind: parameters, gradients, optimizer, buffers."""
        return tensors_of(self.module, self.optimizer, self.replica.wrapper)

    def rehearse(self, shards: Sequence[ShardInput]) -> None:
        """Run one backward before a checkpoint is loaded, if the first backward determines the order of later sums."""
        self.runs.rehearse(shards)
        self.optimizer.zero_grad(set_to_none=True)


@contextmanager
def naming_the_key(module: nn.Module) -> Iterator[None]:
    """Replace a wrapper's error about unused parameters by one that names the key of the job file."""
    try:
        yield
    except RuntimeError as error:
        if UNUSED not in str(error):
            raise
        what = NO_GRADIENT.search(str(error))  # of Muster's wrappers
        numbers = NUMBERS.search(str(error))  # of PyTorch's
        names = [name for name, each in module.named_parameters() if each.requires_grad]
        missing = [names[int(each)] for each in numbers[1].split()] if numbers else ["some parameters"]
        said = what[0] if what else f"the last step has no gradient for {some_of(missing)} on this rank"
        raise RefusedError(
            f"{said}; if the loss does not depend on them in every step, set train.{UNUSED}: true; if it never does, "
            "call requires_grad_(False) on them"
        ) from error


def build_engine(
    settings: "TrainSettings",
    model: nn.Module,
    world: World,
    clock: StepMarks,
    numerics: Numerics,
    sample: Sequence[int] = (),
) -> Engine:
    """Split a model by the job's mode and build its optimizer: a collective.

    `numerics.place` must have placed the model. `sample` is the shape of one input, used to cut a pipeline.
    """
    if settings.cuda_graph is True:
        require_cuda(world.device)
        require_no_hooks(model)
    split = settings.split(world.size)
    groups = groups_of(world, split)
    rank_model = parallelize(model, split, groups, settings, world=world, numerics=numerics, clock=clock, sample=sample)
    return Engine(rank_model, numerics, settings, clock)
