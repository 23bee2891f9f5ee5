"""Compute statistics over the launches of timed rows, for tables, plots and comparisons. Pure."""

from dataclasses import dataclass
from typing import Any

from muster.jobs.basics.errors import RefusedError
from muster.jobs.measuring.launches import MeasuredRow, launch_of, over_launches
from muster.jobs.timing.records import Timed, TimingRecords, Timings


@dataclass(frozen=True)
class ModelRow(MeasuredRow):
    """One model, pass and precision, with the statistics over its launches."""

    timed: Timed
    device: str

    @property
    def key(self) -> tuple[Any, ...]:
        """The key by which rows of two results are matched."""
        return tuple(self.labels.values())

    @property
    def labels(self) -> dict[str, Any]:
        """The model, pass, precision, batch and device of the row."""
        row = self.timed
        return {
            "model": row.model,
            "pass": row.pass_name,
            "precision": row.precision,
            "parameters": row.parameters,
            "batch": row.batch,
            "context": row.context,
            "device": self.device,
        }

    def named(self, *, in_full: bool) -> str:
        """Return the row's name, such as gpt-nano step fp32; in full also parameters, batch and device."""
        row = self.timed
        name = row.case.name
        batch = f"batch {row.batch}" if row.context is None else f"batch {row.batch} x {row.context}"
        return f"{name}, {row.parameters:,} parameters, {batch} on {self.device}" if in_full else name


def rows_of(timing: TimingRecords) -> list[ModelRow]:
    """Return the rows of one run."""
    return [row_of(row, timing.header.device) for row in timing.rows]


def row_of(row: Timed, device: str) -> ModelRow:
    """Return one row with the statistics of its launches."""
    launches = [launch_of([s * 1e6 for s in steps], each.time, each.foreign) for steps, each in row.steps_of_launches]
    numbers = over_launches(launches) if launches else {}
    return ModelRow(row, device, state=row.state, reason=row.reason, **numbers)


def joined_rows(timings: Timings) -> list[ModelRow]:
    """Return the rows of several runs as one result: rows with the same key are merged, with launches in time order.

    Raises:
        RefusedError: if the runs used different settings.
    """
    settings = [timing.header.settings for timing in timings.timings]
    if len({(each.compile, each.activation_checkpointing) for each in settings}) > 1:
        raise RefusedError(
            "results with different settings of compile or activation_checkpointing cannot be combined on one side; "
            "compare them with each other"
        )
    found: dict[tuple[Any, ...], ModelRow] = {}
    for row in (row for timing in timings.timings for row in rows_of(timing)):
        earlier = found.get(row.key)
        found[row.key] = row_of(_joined(earlier.timed, row.timed), row.device) if earlier else row
    return list(found.values())


def _joined(one: Timed, other: Timed) -> Timed:
    """Return a row with the launches of both rows. If one of them is not ok, the result has its state."""
    launches = {launch.time: (steps, launch) for row in (one, other) for steps, launch in row.steps_of_launches}
    ordered = [launches[time] for time in sorted(launches)]
    return (one if one.state != "ok" else other).model_copy(
        update={
            "warm_up_s": [],
            "steps_s": [each for steps, _ in ordered for each in steps],
            "launches": [launch.model_copy(update={"warm_up": 0}) for _, launch in ordered],
        }
    )
