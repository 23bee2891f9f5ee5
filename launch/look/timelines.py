"""Readers of recorded steps, of data-parallel ranks (`data_steps.py`) or of pipelines.

A pipeline's measured bubble is compared with a simulation of the same step with the measured costs.
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
from muster.launch.look.data_steps import DataSpan, DataStep, RankTimes, data_step_of, hidden_s, spans_of
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
    """One step of one pipeline. The rank in a record is a position in the pipeline; `ranks` are the global ranks."""

    schedule: Schedule
    chunks: int
    ranks: tuple[int, ...]
    records: tuple[Record, ...]
    compared: Compared  # the measured bubble, and one simulated with the measured costs
    collectives: tuple[DataSpan, ...] = ()  # averages of gradients over pipelines, by global rank

    def bubble_formula(self) -> float:
        """Return the bubble by the formula for equal stages."""
        table = self.schedule
        return bubble_formula(table.name, table.ranks, table.microbatches, self.chunks)

    @property
    def seconds(self) -> float:
        """The duration of the step, from the first action to the end of the last one."""
        return max((each.end_s for each in self.records if each.kind in COMPUTE), default=0.0)

    def busy_s(self) -> tuple[float, ...]:
        """Return the seconds that each rank computed."""
        return busy_s(self.records, len(self.ranks))

    def to_json(self) -> dict[str, Any]:
        """Return the step for --json; bubbles are fractions of 1, and ranks are global."""
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
            "collectives": [vars(each) for each in self.collectives],
        }

    def averaging(self) -> list[RankTimes]:
        """Return the collectives of each rank that has any, and how long computation hid them."""
        found = []
        for place, rank in enumerate(self.ranks):
            if own := [each for each in self.collectives if each.rank == rank]:
                busy = [
                    (each.start_s, each.end_s) for each in self.records if each.rank == place and each.kind in COMPUTE
                ]
                found.append(RankTimes(rank, {}, len(own), sum(each.bytes or 0 for each in own), *hidden_s(own, busy)))
        return found

    def summary(self) -> dict[str, Any]:
        """Return the ranks, duration, bubble and busy times, without the records."""
        ranks, busy = list(self.ranks), list(self.busy_s())
        return {"ranks": ranks, "makespan_s": self.seconds, "bubble": self.compared.measured, "busy_s": busy}


@dataclass(frozen=True)
class Timeline:
    """One step of an attempt; `steps` lists all steps that the attempt recorded.

    `pipelines` is sorted by first rank. Data-parallel ranks form a single entry.
    """

    attempt: int
    step: int
    steps: tuple[int, ...]
    pipelines: tuple[Recorded | DataStep, ...]

    def slowest(self) -> Recorded | DataStep:
        """Return the pipeline that took longest, for which the others wait."""
        return max(self.pipelines, key=lambda each: each.seconds)

    def of_rank(self, rank: int) -> Recorded | DataStep:
        """Return the pipeline that contains a global rank.

        Raises:
            NotFoundError: if the rank was not recorded.
        """
        for each in self.pipelines:
            if rank in each.ranks:
                return each
        there = ", ".join(str(each) for each in sorted(rank for one in self.pipelines for rank in one.ranks))
        raise NotFoundError(
            f"attempt {self.attempt}, step {self.step}: rank {rank} was not recorded; recorded ranks: {there}"
        )


def read_timeline(run: RunDir, attempt: int | None, step: int | None) -> Timeline:
    """Read a recorded step, by default the newest step of the newest attempt.

    Raises:
        NotFoundError: if the step was not recorded.
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
        raise NotFoundError(f"{where}: no timeline is recorded; training records one at log points (train.log_every)")
    which = "no complete step was recorded" if step is None else f"step {step} was not recorded"
    raise NotFoundError(f"{where}: {which}; recorded steps: {', '.join(map(str, sorted(seen)))}")


def _newest_rows(path: Path, step: int | None) -> tuple[set[int], dict[int, list[Mapping[str, Any]]]]:
    """Return all step numbers in a file, and the rows of the newest steps, or only those of `step`."""
    steps: set[int] = set()
    rows: dict[int, list[Mapping[str, Any]]] = {}
    for row in read_lines(path):
        each = fields.number(row.get("step"), least=0)
        if each is None or len(steps) > MOST_STEPS:
            continue
        steps.add(each)
        if step in (None, each) and len(rows.setdefault(each, [])) < MOST_PIPELINES:
            rows[each].append(row)
        if len(rows) > NEWEST:  # keep several steps, because the rows of the newest may be incomplete
            del rows[min(rows)]
    return steps, rows


def step_of(row: Mapping[str, Any]) -> Recorded | DataStep | None:
    """Read a row of a pipeline or of data-parallel ranks; return None if it is not a valid step."""
    return recorded_of(row) if "schedule" in row else data_step_of(row)


def recorded_of(row: Mapping[str, Any]) -> Recorded | None:
    """Read an untrusted row of a pipeline; return None if it is not a valid step."""
    try:
        ranks = tuple(dict.fromkeys(map(int, row["rank_of"])))  # in the order of the pipeline's first stages
        place_of = {rank: place for place, rank in enumerate(ranks)}
        records = tuple(_record(place_of[rank], *more) for rank, *more in row["records"])
        chunks, microbatches, slices = int(row["chunks"]), int(row["microbatches"]), int(row.get("slices", 1))
        if microbatches % slices or max(chunks, microbatches * len(ranks)) > len(records):
            raise ValueError("more actions than records")
        made = schedule(row["schedule"], len(ranks), microbatches // slices, chunks=max(chunks, 1), slices=slices)
        table = fitted(made, records)
        if tuple(ranks[place] for place in table.rank_of) != tuple(row["rank_of"]):
            raise ValueError("stages are not on the ranks of this schedule")
        collectives = tuple(each for each in spans_of(row.get("collectives", []), ranks) if each.communicates)
        return Recorded(table, chunks, ranks, records, compare([records], table), collectives)
    except (
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        OverflowError,
        ZeroDivisionError,
    ):  # damaged, or from another version
        return None


def _record(place: int, kind: Any, stage: Any, microbatch: Any, start_s: Any, end_s: Any) -> Record:
    numbers = [*map(fields.number, (stage, microbatch)), *map(fields.real, (start_s, end_s))]
    if None in numbers or not isinstance(kind, str):
        raise ValueError("not a record")
    return Record(place, kind, *numbers)  # type: ignore[arg-type]


def fitted(table: Schedule, records: Sequence[Record]) -> Schedule:
    """Return the schedule with its actions in the recorded order, which may differ if the batch was short."""
    actions = tuple(
        tuple(each.action for each in records if each.rank == rank and each.kind in COMPUTE)
        for rank in range(table.ranks)
    )
    if any(sorted(done) != sorted(planned) for done, planned in zip(actions, table.actions, strict=True)):
        raise ValueError("not the actions of this schedule")
    return replace(table, actions=actions)
