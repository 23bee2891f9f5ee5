"""The training loop: read, step, record; at log points say so; after an epoch evaluate."""

from dataclasses import dataclass

import torch

from jobs.reports import Reporter
from jobs.spec import TrainSettings
from jobs.train.clock import Clock, clock_for
from jobs.train.data import Data
from jobs.train.engine import Engine, build_engine
from jobs.train.evaluate import evaluate
from jobs.train.loading import Steps, move, read_steps
from jobs.train.metrics import Files, Metrics, Units
from jobs.train.models import build_model
from jobs.train.optim import learning_rate, set_learning_rate
from jobs.train.sampling import Plan, plan_of, total_steps
from jobs.train.screen import Screen
from jobs.train.world import World

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Trainer:
    """Everything one rank trains with."""

    settings: TrainSettings
    world: World
    data: Data
    plan: Plan
    clock: Clock
    engine: Engine
    dtype: torch.dtype

    def own_steps(self) -> Steps:
        """Return the steps of this rank's virtual ranks: rank r has those from r * k to r * k + k - 1."""
        each = self.plan.virtual_ranks // self.world.size
        return Steps(self.data, self.plan, range(self.world.rank * each, (self.world.rank + 1) * each))


def build_trainer(settings: TrainSettings, data: Data, world: World) -> Trainer:
    """Build the model, the same on every rank, and wrap it as the job's mode says."""
    dtype = DTYPES[settings.precision]
    clock = clock_for(world.device)
    model = build_model(settings.model, vocabulary=data.vocabulary, seed=settings.seed)
    engine = build_engine(settings, model.to(world.device, dtype), world, clock)
    plan = plan_of(settings, samples=data.train_samples, world_size=world.size)
    return Trainer(settings, world, data, plan, clock, engine, dtype)


def train(trainer: Trainer, files: Files, reporter: Reporter, *, attempt: int) -> None:
    """Train for as long as the job says; every rank calls this."""
    steps = total_steps(trainer.settings, trainer.plan)
    units = Units(trainer.data.unit, trainer.data.units_per_sample)
    metrics = Metrics(files, trainer.world, trainer.clock, units, attempt=attempt, steps=steps)
    with Screen(trainer.world, reporter, steps) as screen:
        run_steps(trainer, metrics, screen, steps)


def run_steps(trainer: Trainer, metrics: Metrics, screen: Screen, steps: int) -> None:
    """Run steps 0 to `steps` - 1."""
    settings, engine, clock = trainer.settings, trainer.engine, trainer.clock
    inputs = read_steps(trainer.own_steps(), 0, steps, workers=settings.loader_workers)
    for step in range(steps):
        clock.start()
        work = move(next(inputs), trainer.world.device, trainer.dtype)
        clock.lap("data")
        lr = learning_rate(settings.schedule, settings.optimizer.lr, step, steps)
        set_learning_rate(engine.optimizer, lr)
        losses = engine.train_step(step, work.shards)
        clock.stop()
        metrics.record(work.batch, losses, samples=work.samples, lr=lr)
        last = step + 1 == steps
        if step == 0 or last or (step + 1) % settings.log_every == 0:
            screen.step(metrics.report())
        if settings.evaluate and (last or work.batch.stop == trainer.plan.samples):
            report_evaluation(trainer, metrics, screen, step + 1, work.batch.epoch + 1)
    engine.synchronize_buffers()


def report_evaluation(trainer: Trainer, metrics: Metrics, screen: Screen, step: int, epoch: int) -> None:
    """Evaluate, write the row and say the result."""
    evaluation = evaluate(trainer.engine, trainer.data, trainer.world, trainer.dtype)
    if evaluation is not None:
        metrics.evaluation(step, epoch, evaluation.row())
        screen.say(f"epoch {epoch}  {evaluation.text()}")
