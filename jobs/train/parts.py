"""The parts of batches that one rank trains in mode asynchronous, and their rows."""

import math
from collections.abc import Sequence

import torch

from muster.jobs.saving.pace import Pace
from muster.jobs.train.data.loading import Steps, move
from muster.jobs.train.metrics import LogSummary, Metrics
from muster.jobs.train.numerics.optim import learning_rate, set_learning_rate
from muster.jobs.train.profiling.clock import StepTimes
from muster.jobs.train.soundness import ADVICE, NotFiniteError
from muster.jobs.train.trained import TrainedStep
from muster.jobs.train.trainer import Trainer
from muster.jobs.train.work_queue import CompletedStep, PartResult
from muster.jobs.world.guard import running_user_code


class PartTrainer:
    """One rank's training of the parts that it is given."""

    def __init__(self, trainer: Trainer, metrics: "PartMetrics") -> None:
        self.trainer = trainer
        self.metrics = metrics
        self.pace = Pace()
        parts = range(trainer.plan.virtual_ranks)
        self.readers = [Steps(trainer.data, trainer.plan, (part,)) for part in parts]

    def train(self, number: int) -> PartResult:
        """Train part `number`.

        Raises:
            NotFiniteError: if its loss or gradients are not finite, unless the job skips such updates.
        """
        trainer, engine = self.trainer, self.trainer.engine
        step, part = divmod(number, len(self.readers))
        self.pace.stops(step)  # also marks the beginning of this part
        trainer.clock.start()
        work = move(self.readers[part][step], trainer.world.device, trainer.dtype)
        trainer.clock.lap("data")
        lr = rate_at(trainer, step)
        set_learning_rate(engine.optimizer, lr)
        with running_user_code(f"rank {trainer.world.rank}: step {step + 1}"):
            losses = engine.train_step(step, work.shards)
        trainer.clock.stop()
        figures = engine.figures()
        self.metrics.record(work.batch, losses, samples=work.samples, lr=lr, figures=figures)
        self.pace.step_done(step + 1)
        [loss_sum] = map(float, losses)
        lost = bool(engine.scaler.first_lost) or not math.isfinite(loss_sum)
        if lost and trainer.settings.non_finite == "stop":
            self.metrics.flush()
            raise NotFiniteError(f"loss or gradients are not finite at step {step + 1}: {ADVICE}")
        return PartResult(loss_sum, float(figures["staleness"]))


class PartMetrics(Metrics):
    """A collector of rows: of this rank's parts, and on rank 0 of the run's completed steps."""

    ended = 0.0  # when the last reported step ended, Unix seconds

    def flush(self) -> None:
        """Write this rank's rows. Losses are not kept, because ranks do not exchange them."""
        super().flush()
        self._steps.clear()
        self._times.clear()

    def report_completed(self, done: Sequence[CompletedStep], trainer: Trainer) -> LogSummary:
        """Write the run's rows of the steps that were completed since the last log point, on rank 0."""
        steps, times, losses = [], [], []
        for each in done:
            batch = trainer.plan.batch(each.step)
            figures = {
                "staleness": torch.tensor(sum(each.staleness) / len(each.staleness)),
                "staleness_max": torch.tensor(max(each.staleness)),
            }
            steps.append(
                TrainedStep(batch, [], batch.samples, rate_at(trainer, each.step), each.ended, figures=figures)
            )
            times.append(StepTimes(each.ended - self.ended, {}))
            losses.append(each.loss_sum / batch.samples)
            self.ended = each.ended
        return self.write_steps(steps, times, losses, [])


def rate_at(trainer: Trainer, step: int) -> float:
    """Return the learning rate of a step."""
    return learning_rate(trainer.settings.schedule, trainer.settings.optimizer.lr, step, trainer.steps)
