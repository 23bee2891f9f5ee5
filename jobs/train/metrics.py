"""The metrics of a run, as rows. Each rank writes its own row for every step; rank 0 also writes rows of the whole run.

    attempt-NNN/metrics-RRRRR.jsonl   every step of a rank; written at log points, and at least every second
    epochs.jsonl                      every epoch of the run (`epochs.py`); written by rank 0
    metrics.jsonl                     every step of the run, with the loss over the global batch; written by rank 0 at
                                      log points; a step that is repeated in a later attempt is written again

Between log points a step costs two list appends. At a log point, one all-gather exchanges the losses of all virtual
ranks since the last log point. They are added in the order of virtual ranks, so the losses are the same numbers on
every transport, and with `exact` on every world size.
"""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from muster.jobs.basics.files import read_lines
from muster.jobs.basics.rowlog import RowLog
from muster.jobs.basics.terminal import warn
from muster.jobs.train.data.sampling import GlobalBatch
from muster.jobs.train.epochs import EpochLog
from muster.jobs.train.profiling.clock import StepMarks, StepTimes
from muster.jobs.train.trained import CarriedStep, TrainedStep, gather_carried
from muster.jobs.world.tensorboard import EventFiles
from muster.jobs.world.world import World, add_in_order

FLUSH_S: Final = 1.0
SHOWN: Final = ("loss", "lr", "rate", "step_s")  # columns written for TensorBoard, besides a step's additional columns
RECENT: Final = 20  # number of losses stored in a checkpoint


@dataclass(frozen=True)
class Units:
    """The unit of speed, and the number of units per sample."""

    name: str
    per_sample: int


@dataclass(frozen=True)
class Files:
    """The files for rows: a rank's own, and on rank 0 also the run's metrics and the attempt's timeline."""

    own: Path
    run: Path | None
    timeline: Path | None = None
    events: EventFiles | None = None  # for TensorBoard, on rank 0, if the job asks for them
    epochs: Path | None = None


@dataclass(frozen=True)
class LogSummary:
    """The results of a log point: the newest step, and the speed since the last log point."""

    step: int
    epoch: int
    loss: float
    rate: float  # units (tokens or images) per second
    unit: str
    broken: int | None  # the first step since the last log point whose loss is not finite
    losses: list[tuple[int, float]]  # (step, loss) of every step since the last log point
    notes: list[list[float]]  # the note of each rank


class Metrics:
    """A collector of completed steps, which writes their rows."""

    def __init__(
        self,
        files: Files,
        world: World,
        clock: StepMarks,
        units: Units,
        *,
        attempt: int,
        steps: int,
        patient: bool = False,
        evaluates: bool = False,
        epoch_samples: int = 0,
        carried: Sequence[CarriedStep] | None = None,
    ) -> None:
        # `patient`, with checkpoints: if the disk is full, rows wait in memory, and training ends at the third failed
        # save in a row.
        self.own = RowLog(files.own, patient=patient, say=warn)
        self.run = RowLog(files.run, patient=patient, say=warn) if files.run is not None else None
        self.events = files.events
        self._carried = carried  # None: no attempt before left its steps to this one
        self.world = world
        self.clock = clock
        self.units = units
        self.common = {"attempt": attempt, "rank": world.rank}
        self.steps = steps
        log = RowLog(files.epochs, patient=patient, say=warn) if files.epochs is not None else None
        self.epochs = EpochLog(log, self.common, evaluates=evaluates, samples=epoch_samples)
        self._steps: list[TrainedStep] = []  # steps since the last log point
        self._times: list[StepTimes] = []  # times of the steps whose rows this rank has already written
        self._flushed = time.monotonic()
        self.recent: deque[tuple[int, float]] = deque(maxlen=RECENT)

    @cached_property
    def evaluated(self) -> dict[int, dict[str, float | None]]:
        """The results of earlier attempts' evaluations, on rank 0: read when needed, because the file may be long."""
        return evaluations_in(None if self.run is None else self.run.path)

    @property
    def has_news(self) -> bool:
        """True if there are steps since the last log point."""
        return bool(self._steps)

    def record(
        self,
        batch: GlobalBatch,
        losses: list[Tensor],
        *,
        samples: int,
        lr: float,
        profile: str | None = None,
        figures: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Record a completed step; write this rank's rows if it last wrote at least a second ago."""
        self._steps.append(TrainedStep(batch, losses, samples, lr, time.time(), profile, figures))
        if time.monotonic() - self._flushed >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write this rank's rows for the steps that have none yet."""
        new = self.clock.take()
        steps = self._steps[len(self._times) :]
        self._times += new
        self._flushed = time.monotonic()
        rows = []
        for step, times in zip(steps, new, strict=True):
            loss = add_in_order(float(each) for each in step.losses) / max(step.samples, 1)
            rows.append(self._row(step, times, loss, step.samples) | {"samples": step.samples})
        self.own.append(rows)

    def report(self, note: Sequence[float] = ()) -> LogSummary:
        """Write all rows so far: a collective, at the same step on every rank.

        `note` has numbers for the other ranks, equally many on each rank. Every rank receives all notes.
        """
        self.flush()
        if self._carried is not None:
            self._write_carried(self._carried)
            self._carried = None
        losses, notes = gather_losses(
            self.world, [step.batch for step in self._steps], [step.losses for step in self._steps], note
        )
        steps, times = self._steps, self._times
        self._steps, self._times = [], []
        if self.run is not None:
            rows = [
                self._row(step, each, loss, step.batch.samples)
                for step, each, loss in zip(steps, times, losses, strict=True)
            ]
            self.run.append(rows)
            if self.events is not None:
                self.events.write(rows, (*SHOWN, *steps[-1].figures))
            for step, each, loss in zip(steps, times, losses, strict=True):
                batch = step.batch
                self.epochs.add(
                    *(batch.epoch + 1, step.number, batch.stop),
                    samples=batch.samples,
                    loss=loss,
                    seconds=each.step_s,
                )
            self._write_epochs()
        units = sum(step.batch.samples for step in steps) * self.units.per_sample
        rate = units / max(sum(each.step_s for each in times), 1e-9)
        last = steps[-1]
        numbered = [(step.number, loss) for step, loss in zip(steps, losses, strict=True)]
        self.recent.extend(numbered)
        broken = next((number for number, loss in numbered if not math.isfinite(loss)), None)
        return LogSummary(last.number, last.batch.epoch + 1, losses[-1], rate, self.units.name, broken, numbered, notes)

    def carry(self) -> list[CarriedStep]:
        """Return the steps since the last log point that have times, for the next attempt to report."""
        attempt = self.common["attempt"]
        own = [CarriedStep(attempt, *each) for each in zip(self._steps, self._times, strict=False)]
        return [*(self._carried or ()), *own]

    def _write_carried(self, carried: Sequence[CarriedStep]) -> None:
        """Write the run's rows of earlier attempts' last steps, on rank 0: a collective.

        `lost_samples` in a row: samples of the batch that its loss lacks.
        """
        left = gather_carried(self.world, carried)
        rows = []
        for each in carried:
            (loss, samples), of_all = left[each.number], each.step.batch.samples
            row = self._row(each.step, each.times, loss / samples, of_all)
            rows.append(row | {"attempt": each.attempt, "lost_samples": of_all - samples})
        if self.run is not None:
            self.run.append(rows)

    def evaluation(self, step: int, epoch: int, measured: dict[str, float]) -> None:
        """Write the row of an evaluation, on rank 0.

        If an earlier attempt wrote the same result for the same step, it is not repeated.
        """
        values = {name: finite(value) for name, value in measured.items()}
        row = {"evaluation": True, "step": step, "epoch": epoch, "time": time.time()}
        if self.events is not None:
            # Write a repeated result, too: this attempt has purged the rows that earlier attempts wrote.
            self.events.write([row | values], values, "evaluation/")
        if self.run is not None and self.evaluated.get(step) != values:
            self.run.append([row | self.common | values])
        self.epochs.evaluated(epoch, values)
        self._write_epochs()

    def finish(self) -> None:
        """Write the rows of epochs whose evaluation did not take place."""
        self._write_epochs(at_end=True)

    def _write_epochs(self, *, at_end: bool = False) -> None:
        rows = self.epochs.write(self.units.per_sample, f"{self.units.name}/s", at_end=at_end)
        if self.events is not None and rows:
            self.events.write(rows, ("loss", "rate", "seconds"), "epoch/")

    def _row(self, step: TrainedStep, times: StepTimes, loss: float, samples: int) -> dict[str, Any]:
        return {
            "step": step.number,
            "steps": self.steps,
            "epoch": step.batch.epoch + 1,
            **self.common,
            "loss": finite(loss),
            "lr": step.lr,
            "time": round(step.time, 6),
            **times.row(),
            "rate": samples * self.units.per_sample / max(times.step_s, 1e-9),
            "unit": f"{self.units.name}/s",
            **({"profile": step.profile} if step.profile else {}),
            **{name: float(value) for name, value in step.figures.items()},
        }


def finite(value: float) -> float | None:
    """Return the value, or None for NaN and infinity, which JSON cannot represent."""
    return value if math.isfinite(value) else None


def evaluations_in(path: Path | None) -> dict[int, dict[str, float | None]]:
    """Return the evaluation results in a run's metrics, the newest for each step."""
    found = {}
    for row in read_lines(path) if path is not None else ():
        if row.get("evaluation") and isinstance(row.get("step"), int):
            figures = ("loss", "accuracy", "perplexity")
            found[row["step"]] = {name: row[name] for name in figures if name in row}
    return found


def global_losses(world: World, batches: list[GlobalBatch], losses: list[list[Tensor]]) -> list[float]:
    """Return the mean loss over each global batch, from this rank's sums per virtual rank: a collective."""
    return gather_losses(world, batches, losses, ())[0]


def gather_losses(
    world: World, batches: list[GlobalBatch], losses: list[list[Tensor]], note: Sequence[float]
) -> tuple[list[float], list[list[float]]]:
    """Return the losses as `global_losses` does, and every rank's note, in one collective."""
    sums = torch.stack([torch.stack(each) for each in losses])  # (steps, virtual ranks of this rank)
    said = torch.tensor(note, dtype=sums.dtype, device=sums.device)[:, None].expand(-1, sums.shape[1])  # (note, ...)
    gathered = world.gather(torch.cat([sums, said]))  # per rank (steps + note, virtual ranks of a rank)
    readers = world.readers(gathered)
    of_all = torch.cat([each[: len(batches)] for each in readers], dim=1).tolist()  # (steps, virtual ranks)
    notes = [each[len(batches) :, 0].tolist() for each in gathered]
    return [add_in_order(shards) / batch.samples for shards, batch in zip(of_all, batches, strict=True)], notes
