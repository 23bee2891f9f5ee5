"""Recorded steps, read back: of data-parallel ranks (`data_steps.py`), or of pipelines.

A pipeline's bubble stands beside that of the same step simulated with the same costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.errors import NotFoundError
from muster.jobs.basics.files import read_lines
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import fields
from muster.launch.look.attempts import of_run
from muster.launch.look.data_steps import DataStep, data_step_of
from muster.pipe.schedules.actions import Schedule
from muster.pipe.schedules.draw import COMPUTE
from muster.pipe.schedules.measured import Compared, Record, busy_s, compare
from muster.pipe.schedules.simulate import bubble_formula
from muster.pipe.schedules.tables import schedule

NEWEST: Final = 8  # steps
MOST_STEPS: Final = 1_000_000
MOST_PIPELINES: Final = 1000


@dataclass(frozen=True)
class Recorded:
    """One step of one pipeline; a record's rank is its place in the pipeline, `ranks` are those of the world."""

    schedule: Schedule
    chunks: int
    ranks: tuple[int, ...]
    records: tuple[Record, ...]
    compared: Compared  # its bubble beside the simulated one of the costs that were measured in it

    def bubble_formula(self) -> float:
        """Return the bubble of stages that are alike."""
        table = self.schedule
        return bubble_formula(table.name, table.ranks, table.microbatches, self.chunks)

    @property
    def seconds(self) -> float:
        """How long it took, from the first action to the end of the last one."""
        return max((each.end_s for each in self.records if each.kind in COMPUTE), default=0.0)

    def busy_s(self) -> tuple[float, ...]:
        """Return for how many seconds each of its ranks computed."""
        return busy_s(self.records, len(self.ranks))

    def to_json(self) -> dict[str, Any]:
        """Return it for --json; shares are of 1, ranks those of the world."""
        compared, table = self.compared, self.schedule
        return {
            "schedule": table.name,
            "ranks": table.ranks,
            "microbatches": table.microbatches,
            "rank_of": [self.ranks[place] for place in table.rank_of],
            "makespan_s": self.seconds,
            "simulated_makespan_s": compared.simulation.makespan_s,
            "bubble": compared.measured,
            "simulated_bubble": compared.simulated,
            "bubble_formula": self.bubble_formula(),
            "costs": vars(compared.costs),
            "records": [replace(each, rank=self.ranks[each.rank]).as_dict() for each in self.records],
        }

    def summary(self) -> dict[str, Any]:
        """Return what is told of every pipeline beside the one that is drawn."""
        ranks, busy = list(self.ranks), list(self.busy_s())
        return {"ranks": ranks, "makespan_s": self.seconds, "bubble": self.compared.measured, "busy_s": busy}


@dataclass(frozen=True)
class Timeline:
    """One step of an attempt; `steps` are all that it recorded.

    `pipelines` are in order of their first ranks. Data-parallel ranks are one entry.
    """

    attempt: int
    step: int
    steps: tuple[int, ...]
    pipelines: tuple[Recorded | DataStep, ...]

    def slowest(self) -> Recorded | DataStep:
        """Return the pipeline that took longest: for it the others wait."""
        return max(self.pipelines, key=lambda each: each.seconds)

    def of_rank(self, rank: int) -> Recorded | DataStep:
        """Return the pipeline that a rank of the world is in.

        Raises:
            NotFoundError: none is.
        """
        for each in self.pipelines:
            if rank in each.ranks:
                return each
        there = ", ".join(str(each) for each in sorted(rank for one in self.pipelines for rank in one.ranks))
        raise NotFoundError(f"attempt {self.attempt}, step {self.step}: rank {rank} was not recorded, only {there}")


def read_timeline(run: RunDir, attempt: int | None, step: int | None) -> Timeline:
    """Read a step that an attempt recorded, by default the newest of the newest.

    Raises:
        NotFoundError: there is none.
    """
    numbers = run.attempt_numbers() if attempt is None else [attempt]
    seen: set[int] = set()
    for number in reversed(numbers):
        steps, newest = _newest_rows(run.attempt(number).timeline, step)
        seen.update(steps)
        for each in sorted(newest, reverse=True):
            if pipelines := tuple(found for row in newest[each] if (found := step_of(row)) is not None):
                return Timeline(number, each, tuple(sorted(steps)), pipelines)
    where = of_run(run, attempt)
    if not seen:
        raise NotFoundError(f"{where}: no timeline is there; training records one at log points (train.log_every)")
    raise NotFoundError(f"{where}: step {step} was not recorded, only {', '.join(map(str, sorted(seen)))}")


def _newest_rows(path: Path, step: int | None) -> tuple[set[int], dict[int, list[Mapping[str, Any]]]]:
    """Return all steps of a file of any size, and the rows of the newest, or of one that is asked for."""
    steps: set[int] = set()
    rows: dict[int, list[Mapping[str, Any]]] = {}
    for row in read_lines(path):
        each = fields.number(row.get("step"), least=0)
        if each is None or len(steps) > MOST_STEPS:
            continue
        steps.add(each)
        if step in (None, each) and len(rows.setdefault(each, [])) < MOST_PIPELINES:
            rows[each].append(row)
        if len(rows) > NEWEST:  # of the newest itself no row may be whole
            del rows[min(rows)]
    return steps, rows


def step_of(row: Mapping[str, Any]) -> Recorded | DataStep | None:
    """Read a row of either kind; None where it does not make a step."""
    return recorded_of(row) if "schedule" in row else data_step_of(row)


def recorded_of(row: Mapping[str, Any]) -> Recorded | None:
    """Read a row; None where it does not make a step: nothing read here is trusted."""
    try:
        ranks = tuple(dict.fromkeys(map(int, row["rank_of"])))  # the first stages are those of the ranks in order
        place_of = {rank: place for place, rank in enumerate(ranks)}
        records = tuple(_record(place_of[rank], *more) for rank, *more in row["records"])
        chunks, microbatches = int(row["chunks"]), int(row["microbatches"])
        if max(chunks, microbatches * len(ranks)) > len(records):
            raise ValueError("more actions than records")
        table = fitted(schedule(row["schedule"], len(ranks), microbatches, chunks=max(chunks, 1)), records)
        if tuple(ranks[place] for place in table.rank_of) != tuple(row["rank_of"]):
            raise ValueError("not the places of this schedule")
        return Recorded(table, chunks, ranks, records, compare([records], table))
    except (ValueError, KeyError, TypeError, IndexError, OverflowError):  # torn, or another version's
        return None


def _record(place: int, kind: Any, stage: Any, microbatch: Any, start_s: Any, end_s: Any) -> Record:
    numbers = [*map(fields.number, (stage, microbatch)), *map(fields.real, (start_s, end_s))]
    if None in numbers or not isinstance(kind, str):
        raise ValueError("not a record")
    return Record(place, kind, *numbers)  # type: ignore[arg-type]


def fitted(table: Schedule, records: Sequence[Record]) -> Schedule:
    """Return a schedule whose actions are in the order in which they were done: a short batch has a longer one's."""
    actions = tuple(
        tuple(each.action for each in records if each.rank == rank and each.kind in COMPUTE)
        for rank in range(table.ranks)
    )
    if any(sorted(done) != sorted(planned) for done, planned in zip(actions, table.actions, strict=True)):
        raise ValueError("not the actions of this schedule")
    return replace(table, actions=actions)
