"""The training loop of mode asynchronous, in which no rank waits for another.

every rank    next part ─ data ─ forward ─ backward ─ push ─ pull ─ report the loss        no log points, no barriers
rank 0        also serves the queue of parts, writes the rows of completed steps, and evaluates
the end       a rank that serves a shard stays until the others have finished
"""

from collections.abc import Sequence
from dataclasses import replace
from time import time
from typing import TYPE_CHECKING, cast

from muster.jobs.node import page
from muster.jobs.node.page import Phase
from muster.jobs.node.reports import Reporter
from muster.jobs.train.loop import report_evaluation
from muster.jobs.train.metrics import Files, Units
from muster.jobs.train.parts import PartMetrics, PartTrainer
from muster.jobs.train.queue_access import QueueAccess, QueueClient, QueueServer
from muster.jobs.train.screen import Screen
from muster.jobs.train.soundness import ADVICE, NotFiniteError
from muster.jobs.train.trainer import Trainer
from muster.jobs.train.work_queue import NONE, CompletedStep, WorkQueue
from muster.jobs.world.world import World

if TYPE_CHECKING:
    from muster.ddp.asynchronous.optimizer import AsynchronousOptimizer


def train_asynchronously(trainer: Trainer, files: Files, reporter: Reporter, *, attempt: int) -> None:
    """Train until all parts of all steps are done. Every rank calls this.

    Raises:
        NotFiniteError: if a loss or, at the end, a weight is not finite.
    """
    world, steps = trainer.world, trainer.steps
    optimizer = cast("AsynchronousOptimizer", trainer.engine.optimizer)
    units = Units(trainer.data.unit, trainer.data.units_per_sample)
    metrics = PartMetrics(
        *(files, world, trainer.clock, units),
        attempt=attempt,
        steps=steps,
        evaluates=bool(trainer.settings.evaluate),
        epoch_samples=trainer.plan.samples,
    )
    metrics.ended = time()
    queue = WorkQueue(steps, trainer.plan.virtual_ranks) if world.rank == 0 else None
    access: QueueAccess = (
        QueueClient(optimizer.group) if queue is None else QueueServer(queue, optimizer.group, world.size)
    )
    worker = PartTrainer(trainer, metrics)
    pending = list[CompletedStep]()  # the steps completed since the last log point
    with Screen(world, reporter, steps) as screen:
        part = access.exchange(NONE, None)
        while part != NONE:
            part = access.exchange(part, worker.train(part))
            for done in queue.completed() if queue is not None else ():
                pending.append(done)
                if done.step + 1 in (1, steps) or (done.step + 1) % trainer.settings.log_every == 0:
                    report_steps(pending, trainer, metrics, screen)
                    pending.clear()
                batch = trainer.plan.batch(done.step)
                if trainer.settings.evaluate and batch.stop == trainer.plan.samples and done.step + 1 < steps:
                    evaluate_alone(trainer, metrics, screen, done.step + 1, batch.epoch + 1)
        metrics.flush()
        if queue is not None:
            finish(trainer, metrics, screen)
        optimizer.finish()
        access.join()
    page.own.enter(Phase.END)


def report_steps(done: Sequence[CompletedStep], trainer: Trainer, metrics: PartMetrics, screen: Screen) -> None:
    """Run a log point on rank 0: write the rows of the completed steps, and report progress."""
    summary = metrics.report_completed(done, trainer)
    if done[0].step == 0:
        screen.first_step(1)
    screen.step(summary)


def finish(trainer: Trainer, metrics: PartMetrics, screen: Screen) -> None:
    """Check and evaluate the final parameters, on rank 0.

    Raises:
        NotFiniteError: if a parameter is not finite.
    """
    cast("AsynchronousOptimizer", trainer.engine.optimizer).pull()
    for name, parameter in trainer.engine.module.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise NotFiniteError(f"weights are not finite after step {trainer.steps}, first {name}: {ADVICE}")
    if trainer.settings.evaluate:
        evaluate_alone(trainer, metrics, screen, trainer.steps, trainer.plan.batch(trainer.steps - 1).epoch + 1)
    metrics.finish()


def evaluate_alone(trainer: Trainer, metrics: PartMetrics, screen: Screen, step: int, epoch: int) -> None:
    """Evaluate the parameters that rank 0 last pulled, while the other ranks continue to train."""
    alone = replace(trainer, world=World(0, 1, None, trainer.world.device))
    report_evaluation(alone, metrics, screen, step, epoch)
