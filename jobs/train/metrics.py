"""The metrics of a run, as rows: each rank writes its own steps, rank 0 also the loss over the global batch.

    attempt-NNN/metrics-RRRRR.jsonl   every step of a rank; written at log points, and at least every second
    metrics.jsonl                     every step of the run; written by rank 0 at log points; a step that is repeated in
        a
                                      later attempt is written again

Between log points a step costs two list appends. At a log point one all-gather exchanges the losses of all virtual
ranks
since the last one. They are added in the order of virtual ranks, so the losses are the same numbers on every transport,
and with `exact` on every world size.
"""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from muster.jobs.basics.files import read_lines
from muster.jobs.basics.rowlog import RowLog
from muster.jobs.basics.terminal import warn
from muster.jobs.train.data.sampling import GlobalBatch
from muster.jobs.train.profiling.clock import Clock, StepTimes
from muster.jobs.world.tensorboard import EventFiles
from muster.jobs.world.world import World, add_in_order

FLUSH_S: Final = 1.0
SHOWN: Final = ("loss", "lr", "rate", "step_s")  # in TensorBoard, beside further columns of a step
RECENT: Final = 20  # losses that a checkpoint carries


@dataclass(frozen=True)
class Units:
    """The unit of speed, and the number of units per sample."""

    name: str
    per_sample: int


@dataclass(frozen=True)
class Files:
    """The paths of rows: a rank's own file; on rank 0 also those of the run and the attempt."""

    own: Path
    run: Path | None
    timeline: Path | None = None
    events: EventFiles | None = None  # on rank 0, if the job asks for them


@dataclass(frozen=True)
class Summary:
    """The results of a log point: the newest step, and the speed since the last log point."""

    step: int
    epoch: int
    loss: float
    rate: float  # units per second
    unit: str
    broken: int | None  # the first step since the last log point whose loss is not finite
    losses: list[tuple[int, float]]  # of every step since the last log point
    notes: list[list[float]]  # the note of each rank


@dataclass(frozen=True)
class Step:
    """One completed step; `losses` are this rank's sums per virtual rank."""

    batch: GlobalBatch
    losses: list[Tensor]
    samples: int
    lr: float
    time: float
    profile: str | None = None  # how the profiler treated it
    figures: Mapping[str, Tensor] = field(default_factory=dict)  # further columns: scalars

    @property
    def number(self) -> int:
        """The step counted from 1, as rows have it."""
        return self.batch.step + 1


class Metrics:
    """Collects steps and writes their rows."""

    def __init__(
        self,
        files: Files,
        world: World,
        clock: Clock,
        units: Units,
        *,
        attempt: int,
        steps: int,
        patient: bool = False,
    ) -> None:
        # If the job has checkpoints, a full disk first costs saves; only the third in a row ends training.
        self.own = RowLog(files.own, patient=patient, say=warn)
        self.run = RowLog(files.run, patient=patient, say=warn) if files.run is not None else None
        self.events = files.events
        self.world = world
        self.clock = clock
        self.units = units
        self.common = {"attempt": attempt, "rank": world.rank}
        self.steps = steps
        self._steps: list[Step] = []  # since the last log point
        self._times: list[StepTimes] = []  # for the first of these steps, whose own rows are written already
        self._flushed = time.monotonic()
        self.recent: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self.evaluated = evaluations_in(files.run)

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
        """Record a completed step; write this rank's rows if the last write is at least a second ago."""
        self._steps.append(Step(batch, losses, samples, lr, time.time(), profile, figures))
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

    def report(self, note: Sequence[float] = ()) -> Summary:
        """Write all rows so far: a collective, at the same step on every rank.

        `note` has this rank's numbers for the others, the same count on each. Every rank receives all notes.
        """
        self.flush()
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
        units = sum(step.batch.samples for step in steps) * self.units.per_sample
        rate = units / max(sum(each.step_s for each in times), 1e-9)
        last = steps[-1]
        numbered = [(step.number, loss) for step, loss in zip(steps, losses, strict=True)]
        self.recent.extend(numbered)
        broken = next((number for number, loss in numbered if not math.isfinite(loss)), None)
        return Summary(last.number, last.batch.epoch + 1, losses[-1], rate, self.units.name, broken, numbered, notes)

    def evaluation(self, step: int, epoch: int, measured: dict[str, float]) -> None:
        """Write the row of an evaluation, on rank 0.

        If an earlier attempt wrote the same result for the same step, it is not repeated.
        """
        values = {name: finite(value) for name, value in measured.items()}
        row = {"evaluation": True, "step": step, "epoch": epoch, "time": time.time()}
        if self.events is not None:  # again, too: the first step of this attempt has purged what followed
            self.events.write([row | values], values, "evaluation/")
        if self.run is None or self.evaluated.get(step) == values:
            return
        self.run.append([row | self.common | values])

    def _row(self, step: Step, times: StepTimes, loss: float, samples: int) -> dict[str, Any]:
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
    """Return a number, or None for NaN and infinity, which JSON lacks."""
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
