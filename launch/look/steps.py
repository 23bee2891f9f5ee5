"""What a training run measured of its steps: one number a step, of all its ranks together. Only reads.

    rank 0   data | forward | backward | wait | optimizer |           |
    rank 1   data | forward | backward        | wait | optimizer      |      a step's time: that of the slowest rank
             └────── the mean of the ranks, part by part ──────┘ idle ┘      idle: what is left of the step

A step that several attempts have done counts as the newest did it. Steps without a row of every rank are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from muster.jobs.basics.errors import MusterError, NotFoundError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.look.memories import read_memories
from muster.launch.look.rank_rows import COLUMN, Table, over_ranks, read_losses, read_rank

PARTS: Final = ("data", "computation", "communication", "optimizer", "idle")
COLUMNS: Final[Mapping[str, Sequence[str]]] = {  # of a rank's row, in seconds
    "data": ("data_s",),
    "computation": ("forward_s", "backward_s", "replay_s"),
    "communication": ("communication_s",),
    "optimizer": ("optimizer_s",),
}
SUMS: Final = [COLUMN[name] for name in ("rate", *(each for columns in COLUMNS.values() for each in columns))]
LARGEST: Final = [COLUMN["step_s"], COLUMN["time"]]
SLOW: Final = 1.2  # times the usual step: a step so slow at the beginning is warm-up


@dataclass(frozen=True)
class Step:
    """One step: times in seconds, `units` (samples or tokens) of all ranks."""

    number: int  # counted from 1
    epoch: int
    seconds: float
    parts: Mapping[str, float]
    units: float
    loss: float | None
    time: float  # unix seconds, at its end


@dataclass(frozen=True)
class Measured:
    """The steps of one run, without its warm-up."""

    run_id: str
    mode: str
    ranks: int
    batch: int | None  # global; None: the job cannot be read
    unit: str  # of the rate
    steps: tuple[Step, ...]
    skipped: int
    peak_bytes: int | None  # of the fullest rank

    @property
    def final_loss(self) -> float | None:
        """The loss of the last step."""
        return self.steps[-1].loss

    def without_warm_up(self, *, skip: int | None = None, skip_epochs: int = 0) -> "Measured":
        """Return it without `skip` steps and `skip_epochs` epochs (None: as `warm_up` finds).

        Raises:
            NotFoundError: no step is left.
        """
        counted = [step for step in self.steps if step.epoch > skip_epochs]
        skip = (0 if skip_epochs else warm_up(counted)) if skip is None else skip
        if not counted[skip:]:
            done = f"{len(self.steps)} steps are recorded, none is left to compare"
            raise NotFoundError(f"{self.run_id}: {done}; skip fewer, or train longer")
        return replace(self, steps=tuple(counted[skip:]), skipped=len(self.steps) - len(counted[skip:]))


def read_measured(run: RunDir, *, skip: int | None = None, skip_epochs: int = 0) -> Measured:
    """Read a run's steps, without warm-up; errors as `without_warm_up`."""
    return read_whole(run).without_warm_up(skip=skip, skip_epochs=skip_epochs)


def read_whole(run: RunDir) -> Measured:
    """Read a run's steps, all of them.

    Raises:
        NotFoundError: there is none.
    """
    mode, batch = _job(run)
    steps, ranks, unit = _steps(run)
    if not steps:
        raise NotFoundError(f"{run.path}: no step is recorded; train first, or name another run")
    try:
        peak = max(each.peak for each in read_memories(run, None)[1])
    except NotFoundError:
        peak = None
    return Measured(run.run_id, mode, ranks, batch, unit, tuple(steps), 0, peak)


def warm_up(steps: Sequence[Step]) -> int:
    """Count the steps at the beginning that are slower than usual: at least one, at most half.

    Usual is the median of the second half; one that takes 1.2 times as long is slower.
    """
    if len(steps) < 2:
        return 0
    half = len(steps) // 2
    usual = median(step.seconds for step in steps[half:])
    slow = next((place for place, step in enumerate(steps[:half]) if step.seconds <= SLOW * usual), half)
    return max(slow, 1)


def _steps(run: RunDir) -> tuple[list[Step], int, str]:
    """Return all steps in order, the ranks of the newest attempt, and the unit of the rate."""
    newest: dict[int, tuple[Table, int]] = {}  # by step: its row over all ranks, and how many they were
    for attempt in run.attempt_numbers():
        paths = sorted(run.attempt(attempt).path.glob("metrics-*.jsonl"))
        table, ranks = over_ranks(map(_with_units, map(read_rank, paths)), SUMS, LARGEST)
        newest |= {int(row[0]): (row, ranks) for row in table}
    losses, unit = read_losses(run.metrics)
    steps = [_step(*newest[place], losses.get(place)) for place in sorted(newest)]
    return steps, newest[steps[-1].number][1] if steps else 0, unit


def _with_units(table: Table) -> Table:
    """Turn the rate of each step into the units that were done in it: those of ranks can be added."""
    table[:, COLUMN["rate"]] *= table[:, COLUMN["step_s"]]
    return table


def _step(row: Table, ranks: int, loss: float | None) -> Step:
    found: dict[str, float] = dict(zip(COLUMN, row.tolist(), strict=True))
    seconds = found["step_s"]
    parts = {part: sum(found[column] for column in columns) / ranks for part, columns in COLUMNS.items()}
    parts["idle"] = max(seconds - sum(parts.values()), 0.0)
    return Step(int(found["step"]), int(found["epoch"]), seconds, parts, found["rate"], loss, found["time"])


def _job(run: RunDir) -> tuple[str, int | None]:
    """Return the mode and the batch size of a run's job, as far as it can be read."""
    from muster.jobs.spec.expand import split_text
    from muster.jobs.spec.train import TrainSettings
    from muster.launch.bench import loads

    try:
        settings = loads.train_job(str(run.job), ()).settings
    except MusterError:
        return "", None
    assert isinstance(settings, TrainSettings)
    return split_text(settings), settings.batch_size


def losses_of(measured: Measured) -> Iterator[tuple[int, float]]:
    """Yield the steps that have a loss, each with it."""
    return ((step.number, step.loss) for step in measured.steps if step.loss is not None)
