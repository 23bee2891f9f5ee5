"""The measured steps of a training run, each combined over all ranks. Only reads.

    rank 0   data | forward | backward | wait | optimizer |           |
    rank 1   data | forward | backward        | wait | optimizer      |      a step's time: that of the slowest rank
             └─────────── mean of each part over ranks ────────┘ idle ┘      idle: the rest of the step

If several attempts did the same step, the newest one counts. Steps without a row from every rank are omitted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

import numpy

from muster.jobs.basics.errors import MusterError, NotFoundError
from muster.jobs.basics.files import read_lines
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common.fields import text
from muster.launch.look.memories import read_memories
from muster.launch.look.rank_rows import COLUMN, LossRow, Table, over_ranks, read_rank, read_run
from muster.launch.look.stragglers import with_stragglers
from muster.launch.records.runstate import read_state
from muster.launch.records.stragglers import Straggler

PARTS: Final = ("data", "computation", "communication", "optimizer", "idle")
COLUMNS: Final[Mapping[str, Sequence[str]]] = {  # columns of a rank's row, in seconds
    "data": ("data_s",),
    "computation": ("forward_s", "backward_s", "replay_s"),
    "communication": ("communication_s",),
    "optimizer": ("optimizer_s",),
}
SUMS: Final = [COLUMN[name] for name in ("rate", *(each for columns in COLUMNS.values() for each in columns))]
LARGEST: Final = [COLUMN["step_s"], COLUMN["time"]]
SLOW: Final = 1.2  # first steps that take longer than this multiple of the usual step time are warm-up


@dataclass(frozen=True)
class MeasuredStep:
    """One step over all ranks: times in seconds, `units` in samples or tokens."""

    number: int  # number of the step, counted from 1
    epoch: int
    seconds: float
    parts: Mapping[str, float]
    units: float
    loss: float | None
    time: float  # end of the step, in Unix seconds


@dataclass(frozen=True)
class Measured:
    """The steps of one run, without its warm-up."""

    run_id: str
    mode: str
    ranks: int
    batch: int | None  # the global batch size; None if the job cannot be read
    unit: str  # the unit of the rate
    steps: tuple[MeasuredStep, ...]
    skipped: int
    peak_bytes: int | None  # peak memory of the rank with the highest peak
    stragglers: tuple[Straggler, ...] = ()  # of the newest attempt

    @property
    def final_loss(self) -> float | None:
        """The loss of the last step."""
        return self.steps[-1].loss

    def without_warm_up(self, *, skip: int | None = None, skip_epochs: int = 0) -> "Measured":
        """Return the run without its first `skip_epochs` epochs and the `skip` steps after them.

        If `skip` is None, it is 0 when epochs are skipped, else the result of `warm_up`.

        Raises:
            NotFoundError: if this leaves out all steps.
        """
        counted = [step for step in self.steps if step.epoch > skip_epochs]
        skip = (0 if skip_epochs else warm_up(counted)) if skip is None else skip
        if not counted[skip:]:
            done = f"all {len(self.steps)} recorded steps are skipped as warm-up"
            raise NotFoundError(f"{self.run_id}: {done}; skip fewer, or train longer")
        return replace(self, steps=tuple(counted[skip:]), skipped=len(self.steps) - len(counted[skip:]))


def read_measured(run: RunDir, *, skip: int | None = None, skip_epochs: int = 0) -> Measured:
    """Read a run's steps without warm-up. Errors as for `read_whole` and `without_warm_up`."""
    return read_whole(run).without_warm_up(skip=skip, skip_epochs=skip_epochs)


def read_whole(run: RunDir) -> Measured:
    """Read all steps of a run.

    Raises:
        NotFoundError: if no step is recorded.
    """
    mode, batch = _job(run)
    steps, ranks, unit = _steps(run, in_step=not mode.endswith("asynchronous"))
    if not steps:
        raise NotFoundError(f"{run.path}: no step is recorded; train first, or name another run")
    try:
        peak = max(each.peak for each in read_memories(run, None)[1])
    except NotFoundError:
        peak = None
    slow = with_stragglers(read_state(run)).stragglers
    return Measured(run.run_id, mode, ranks, batch, unit, tuple(steps), 0, peak, slow)


def warm_up(steps: Sequence[MeasuredStep]) -> int:
    """Count the slow steps at the beginning: at least one, at most half of all.

    A step is slow if it takes more than 1.2 times the median of the second half.
    """
    if len(steps) < 2:
        return 0
    half = len(steps) // 2
    usual = median(step.seconds for step in steps[half:])
    slow = next((place for place, step in enumerate(steps[:half]) if step.seconds <= SLOW * usual), half)
    return max(slow, 1)


def _steps(run: RunDir, *, in_step: bool) -> tuple[list[MeasuredStep], int, str]:
    """Return all steps in order, the ranks of the newest attempt, and the unit of the rate.

    `in_step`: all ranks run the same step at the same time. Only those of version 0.1.0's mode asynchronous did not.
    """
    newest: dict[int, tuple[Table, int]] = {}  # {step: (its row combined over all ranks, number of ranks)}
    of_run, unit = read_run(run.metrics)
    for attempt in run.attempt_numbers():
        paths = sorted(run.attempt(attempt).path.glob("metrics-*.jsonl"))
        tables = [_with_units(read_rank(path)) for path in paths]
        table, ranks = over_ranks(tables, SUMS, LARGEST) if in_step else (_of_parts(run, tables), len(tables))
        newest |= {int(row[0]): (row, ranks) for row in _of_batches(table, of_run)}
    steps = [_step(*newest[place], of_run[place].loss if place in of_run else None) for place in sorted(newest)]
    return steps, newest[steps[-1].number][1] if steps else 0, unit


def _of_batches(table: Table, of_run: Mapping[int, LossRow]) -> Table:
    """Set the units of each step to those of its global batch, which the run's rows have.

    Ranks that hold one copy of the model together each record its whole batch, so a sum over ranks has it several
    times. Steps that rank 0 has not reported yet have the same share of their sum as the other steps of the attempt.
    """
    summed = table[:, COLUMN["rate"]]
    units = numpy.array([of_run[step].units if step in of_run else 0.0 for step in map(int, table[:, 0])])
    known = (units > 0.0) & (summed > 0.0)
    share = units[known].sum() / summed[known].sum() if known.any() else 1.0
    table[:, COLUMN["rate"]] = numpy.where(known, units, summed * share)
    return table


def _of_parts(run: RunDir, tables: Sequence[Table]) -> Table:
    """Combine the rows of ranks that did not run the same step at the same time.

    The time in a row of the run is that between two completed steps. In that time, each rank did a part of its own
    work. So the times by phase in every row are set to the means over all rows of all ranks, times the number of ranks.
    """
    table = _with_units(read_rank(run.metrics))
    parts = [each for each in SUMS if each != COLUMN["rate"]]
    rows = numpy.concatenate([*tables, numpy.zeros((0, len(COLUMN)))])
    if len(rows):
        table[:, parts] = rows[:, parts].mean(axis=0) * len(tables)
    return table


def _with_units(table: Table) -> Table:
    """Replace the rate of each step by its number of units."""
    table[:, COLUMN["rate"]] *= table[:, COLUMN["step_s"]]
    return table


def _step(row: Table, ranks: int, loss: float | None) -> MeasuredStep:
    found: dict[str, float] = dict(zip(COLUMN, row.tolist(), strict=True))
    seconds = found["step_s"]
    parts = {part: sum(found[column] for column in columns) / ranks for part, columns in COLUMNS.items()}
    parts["idle"] = max(seconds - sum(parts.values()), 0.0)
    return MeasuredStep(int(found["step"]), int(found["epoch"]), seconds, parts, found["rate"], loss, found["time"])


def _job(run: RunDir) -> tuple[str, int | None]:
    """Return the mode and the batch size of a run's job. If it cannot be read, the rows of attempts have the mode."""
    from muster.jobs.spec.expand import split_text
    from muster.jobs.spec.train import TrainSettings
    from muster.launch.bench import loads

    try:
        settings = loads.train_job(str(run.job), ()).settings
    except MusterError:
        modes = [text(row.get("mode")) for row in read_lines(run.attempts)]
        return (modes and modes[-1]) or "", None
    assert isinstance(settings, TrainSettings)
    return split_text(settings), settings.batch_size


def losses_of(measured: Measured) -> Iterator[tuple[int, float]]:
    """Yield the number and the loss of each step that has a loss."""
    return ((step.number, step.loss) for step in measured.steps if step.loss is not None)
