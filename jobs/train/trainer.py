"""What one rank trains with: the model, wrapped according to the job's mode, the data, and the settings."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from muster.jobs.train.data import Data
from muster.jobs.train.data.loading import Steps
from muster.jobs.train.data.sampling import Plan, plan_of, total_steps
from muster.jobs.train.engine import Engine, build_engine
from muster.jobs.train.models import model_of
from muster.jobs.train.models.made import digest_of
from muster.jobs.train.numerics import numerics_of
from muster.jobs.train.profiling.clock import StepMarks, clock_for
from muster.jobs.train.timeline import NotRecording
from muster.jobs.world.world import World, require_equal

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings

NOT_RECORDING = NotRecording()


@dataclass(frozen=True)
class Trainer:
    """The settings and objects that one rank trains with."""

    settings: "TrainSettings"
    world: World
    data: Data
    plan: Plan
    clock: StepMarks
    engine: Engine
    dtype: torch.dtype
    timeline: NotRecording = NOT_RECORDING

    @property
    def steps(self) -> int:
        """The number of steps that the job asks for."""
        return total_steps(self.settings, self.plan)

    def own_steps(self) -> Steps:
        """Return the steps of this rank's virtual ranks: data rank r has virtual ranks r * k to r * k + k - 1.

        A pipeline cuts its part into micro-batches itself.
        """
        plan = replace(self.plan, accumulation=1) if self.settings.is_pipeline else self.plan
        each, place = plan.virtual_ranks // self.world.data_ranks, self.world.data_rank
        return Steps(self.data, plan, range(place * each, (place + 1) * each))


def build_trainer(settings: "TrainSettings", data: Data, world: World) -> Trainer:
    """Build the model, the same on every rank, and wrap it according to the job's mode."""
    numerics = numerics_of(settings, world.device)
    split = settings.split(world.size)
    world = replace(world, pipe=split.pipe, tensor=split.tensor)
    clock = clock_for(world.device)
    model = numerics.place(model_of(settings, vocabulary=data.vocabulary))
    if settings.model.make is not None:
        hint = "it may depend only on args and torch's random numbers"
        require_equal(world, f"model {settings.model.make}", digest_of(model), hint)
    engine = build_engine(settings, model, world, clock, numerics, data.sample_shape)
    plan = plan_of(settings, samples=data.train_samples, world_size=world.size)
    return Trainer(settings, world, data, plan, clock, engine, numerics.inputs)
