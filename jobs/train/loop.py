"""The training loop: read, step, record. Report at log points, evaluate after epochs, save when due.

before a step     stop if the rank parent asked for it (a drain, or ranks that join)
a step            data, forward, backward, communication, optimizer
a log point       all ranks exchange the losses since the last one, and whether to save
not finite        the attempt fails, after a last log point if all ranks know of it
the end           save, if the job has checkpoints
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from muster.jobs.node import page
from muster.jobs.node.orders import Orders
from muster.jobs.node.page import Phase
from muster.jobs.node.reports import Reporter
from muster.jobs.saving.pace import Pace
from muster.jobs.saving.replay import Replay
from muster.jobs.saving.saver import NotSaving
from muster.jobs.spec.expand import split_text
from muster.jobs.train.data.loading import move, read_steps
from muster.jobs.train.evaluate import evaluate
from muster.jobs.train.metrics import Files, LogSummary, Metrics, Units
from muster.jobs.train.models.made import loss_of
from muster.jobs.train.numerics.optim import learning_rate, set_learning_rate
from muster.jobs.train.profiling.recorder import NOT_PROFILING, NotProfiling
from muster.jobs.train.regroup import Interrupted, LivingState, why_unique
from muster.jobs.train.screen import Screen
from muster.jobs.train.soundness import Soundness, require_finite
from muster.jobs.train.timeline import NotRecording, PipelineRecorder, StepRecorder
from muster.jobs.train.trainer import Trainer
from muster.jobs.world.guard import running_user_code

NOT_SAVING = NotSaving()


def train(
    trainer: Trainer,
    files: Files,
    reporter: Reporter,
    *,
    attempt: int,
    first: int = 0,
    saving: NotSaving = NOT_SAVING,
    replay: Replay | None = None,
    profiling: NotProfiling = NOT_PROFILING,
    living: LivingState | None = None,
    evaluates: bool = False,
) -> bool:
    """Train from step `first` to the end of the job. Every rank calls this.

    `living` keeps the state if the group breaks; without it, the rank ends with its group. `evaluates`: first do the
    evaluation that was due at `first`.
    Returns True if the ranks were asked to stop, and stopped before the end after saving.

    Raises:
        Interrupted: if the ranks were asked to wait for the next attempt.
        NotFiniteError: if a loss or weight is not finite. Such a state is not saved.
    """
    living = living or LivingState(Orders(), stays=False)
    steps = trainer.steps
    units = Units(trainer.data.unit, trainer.data.units_per_sample)
    trainer = replace(trainer, timeline=recorder_of(trainer, files))
    metrics = Metrics(
        *(files, trainer.world, trainer.clock, units),
        attempt=attempt,
        steps=steps,
        patient=saving.patient,
        evaluates=bool(trainer.settings.evaluate),
        epoch_samples=trainer.plan.samples,
        carried=living.take_carried(first),
    )
    with Screen(trainer.world, reporter, steps, patient=saving.patient) as screen:
        with profiling:  # the profile is written after everything is saved
            with abandoning(saving, metrics, living):
                if evaluates:
                    evaluate_after(trainer, metrics, screen, first, living)
                done = run_steps(
                    *(trainer, metrics, screen, steps, living),
                    first=first,
                    saving=saving,
                    replay=replay,
                    profiling=profiling,
                )
            metrics.finish()
            if page.own.regroups and done < steps:
                saving.pass_on(done, metrics.recent) if why_unique(trainer) else saving.settle()
                raise Interrupted("ranks join")
            require_finite(trainer.engine, trainer.world, done)
            saving.finish(done, metrics.recent)
        if profiling.summary is not None:
            screen.say(profiling.summary)
    page.own.enter(Phase.END)
    return done < steps


@contextmanager
def abandoning(saving: NotSaving, metrics: Metrics, living: LivingState) -> Iterator[None]:
    """If the steps fail and this rank may continue, give up the save in flight, and write this rank's rows."""
    try:
        yield
    except Exception:
        if living.stays:
            living.begun = saving.abandon()
            with suppress(ValueError):  # the times of an incomplete step
                metrics.flush()
            living.carried = metrics.carry()
        raise


def recorder_of(trainer: Trainer, files: Files) -> NotRecording:
    """Return the recorder of this run's timelines."""
    engine, world = trainer.engine, trainer.world
    if engine.stages is not None:
        return PipelineRecorder(engine.stages, files.timeline)
    mode = split_text(trainer.settings)
    return StepRecorder(trainer.clock, world, files.timeline, mode=mode, not_timed=engine.not_timed)


def run_steps(
    trainer: Trainer,
    metrics: Metrics,
    screen: Screen,
    steps: int,
    living: LivingState,
    *,
    first: int = 0,
    saving: NotSaving = NOT_SAVING,
    replay: Replay | None = None,
    profiling: NotProfiling = NOT_PROFILING,
) -> int:
    """Run steps `first` to `steps` - 1, or until the rank parent requests a stop.

    Returns the number of completed steps, including those before `first`.
    """
    settings, engine, clock = trainer.settings, trainer.engine, trainer.clock
    inputs = read_steps(trainer.own_steps(), first, steps, workers=settings.loader_workers)
    pace, done, noticed = Pace(), first, engine.notice

    def is_log_point(done: int) -> bool:
        return done in (first + 1, steps) or done % settings.log_every == 0

    soundness = Soundness(engine.scaler.first_lost, first, stops=settings.non_finite == "stop")
    while done < steps and not pace.stops(done):
        trainer.timeline.expect(is_log_point(done + 1))
        clock.start()
        work = move(next(inputs), trainer.world.device, trainer.dtype)
        clock.lap("data")
        lr = learning_rate(settings.schedule, settings.optimizer.lr, done, steps)
        set_learning_rate(engine.optimizer, lr)
        living.begin_step()
        with running_user_code(f"rank {trainer.world.rank}: step {done + 1}"):
            losses = engine.train_step(done, work.shards)
        clock.stop()
        if engine.notice != noticed:
            noticed = engine.notice
            screen.say(noticed)
        metrics.record(
            work.batch, losses, samples=work.samples, lr=lr, profile=profiling.word, figures=engine.scaler.row()
        )
        done += 1
        living.step_done(done)
        pace.step_done(done)
        if done == first + 1:
            screen.first_step(done)
        lost = soundness.is_lost()
        if lost and not soundness.is_known_to_all(trainer.world, engine.scaler):
            metrics.flush()
            soundness.end()
        if lost or is_log_point(done) or saving.is_due(done):
            soundness.hear(report_steps(metrics, screen, saving, replay, done, trainer.timeline).losses)
        if is_evaluated(trainer, done):
            evaluate_after(trainer, metrics, screen, done, living)
        saving.step_done(done, metrics.recent)
        profiling.step_done(done)
    if metrics.has_news:  # the loop stopped between two log points
        soundness.hear(report_steps(metrics, screen, saving, replay, done, trainer.timeline).losses)
    engine.model.synchronize_buffers()
    return done


def report_steps(
    metrics: Metrics, screen: Screen, saving: NotSaving, replay: Replay | None, done: int, timeline: NotRecording
) -> LogSummary:
    """Run a log point: exchange losses and the savers' notes, write the rows and report progress."""
    summary = metrics.report(saving.note(done))
    timeline.record(done)
    screen.step(summary)
    saving.hear(done, summary.notes, sound=math.isfinite(summary.loss))
    if replay is not None and (result := replay.check(summary.losses)):
        screen.say(result)
    return summary


def is_evaluated(trainer: Trainer, done: int) -> bool:
    """Return True if an evaluation follows step number `done`, because an epoch or the training ends there."""
    batch = trainer.plan.batch(done - 1)
    return bool(trainer.settings.evaluate) and (done == trainer.steps or batch.stop == trainer.plan.samples)


def evaluate_after(trainer: Trainer, metrics: Metrics, screen: Screen, done: int, living: LivingState) -> None:
    """Evaluate after step number `done`, write the row and print the result."""
    page.own.enter(Phase.EVALUATE)
    evaluation = evaluate(trainer.engine, trainer.data, trainer.world, trainer.dtype, loss_of(trainer.settings))
    if evaluation is not None:
        epoch = trainer.plan.batch(done - 1).epoch + 1
        metrics.evaluation(done, epoch, evaluation.row())
        screen.say(f"epoch {epoch}  {evaluation.text()}")
    page.own.enter(Phase.RUN)
    living.evaluated = done
