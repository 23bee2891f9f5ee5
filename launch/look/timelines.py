"""Recorded steps of a pipeline, read back: their bubble, and that of the same step simulated with the same costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jobs.errors import RunFolderError
from jobs.files import read_lines
from jobs.rundir import RunDir
from pipe.schedules.actions import Schedule
from pipe.schedules.measured import Compared, Record, compare
from pipe.schedules.simulate import bubble_formula
from pipe.schedules.tables import schedule


@dataclass(frozen=True)
class Recorded:
    """One step of one pipeline."""

    step: int
    schedule: Schedule
    chunks: int
    records: tuple[Record, ...]

    def compared(self) -> Compared:
        """Set its bubble beside the simulated one of the costs that were measured in it."""
        return compare([self.records], self.schedule)

    def bubble_formula(self) -> float:
        """Return the bubble of stages that are alike."""
        table = self.schedule
        return bubble_formula(table.name, table.ranks, table.microbatches, self.chunks)

    def to_json(self) -> dict[str, Any]:
        """Return it for --json; shares are of 1."""
        compared, table = self.compared(), self.schedule
        return {
            "step": self.step,
            "schedule": table.name,
            "ranks": table.ranks,
            "microbatches": table.microbatches,
            "rank_of": list(table.rank_of),
            "makespan_s": self.seconds,
            "simulated_makespan_s": compared.simulation.makespan_s,
            "bubble": compared.measured,
            "simulated_bubble": compared.simulated,
            "bubble_formula": self.bubble_formula(),
            "costs": vars(compared.costs),
            "records": [each.as_dict() for each in self.records],
        }

    @property
    def seconds(self) -> float:
        """How long it took, from the first action to the end of the last one."""
        return max((each.end_s for each in self.records if each.kind not in ("send", "wait")), default=0.0)


def read_timeline(run: RunDir, attempt: int | None, step: int | None) -> tuple[int, Recorded, list[int]]:
    """Read a step that an attempt recorded, by default the newest of the newest; return the steps that there are, too.

    Raises:
        RunFolderError: there is none.
    """
    numbers = run.attempt_numbers() if attempt is None else [attempt]
    seen: list[int] = []
    for number in reversed(numbers):
        rows = [row for row in read_lines(run.attempt(number).timeline) if isinstance(row.get("step"), int)]
        found = [row for row in rows if step is None or row["step"] == step]
        seen += [row["step"] for row in rows]
        for row in reversed(found):
            if (recorded := recorded_of(row)) is not None:
                return number, recorded, [each["step"] for each in rows]
    where = run.run_id if attempt is None else f"attempt {attempt} of {run.run_id}"
    if not seen:
        raise RunFolderError(
            f"{where}: no timeline is there; pipelines record one at every log point (train.log_every)"
        )
    raise RunFolderError(f"{where}: step {step} was not recorded, only {', '.join(map(str, sorted(set(seen))))}")


def recorded_of(row: Mapping[str, Any]) -> Recorded | None:
    """Read a row; None where it does not make a step: nothing read here is trusted."""
    try:
        records = tuple(Record(*each) for each in row["records"])
        ranks, chunks = 1 + max(row["rank_of"]), int(row["chunks"])
        table = schedule(row["schedule"], ranks, int(row["microbatches"]), chunks=max(chunks, 1))
        recorded = Recorded(int(row["step"]), fitted(table, records), chunks, records)
        recorded.compared()
        return recorded
    except (ValueError, KeyError, TypeError, IndexError):  # torn, or another version's
        return None


def fitted(table: Schedule, records: Sequence[Record]) -> Schedule:
    """Return a schedule whose actions are in the order in which they were done: a short batch has a longer one's."""
    actions = tuple(
        tuple(each.action for each in records if each.rank == rank and each.kind not in ("send", "wait"))
        for rank in range(table.ranks)
    )
    if any(sorted(done) != sorted(planned) for done, planned in zip(actions, table.actions, strict=True)):
        raise ValueError("not the actions of this schedule")
    return replace(table, actions=actions)
