"""The steps of runs beside their prediction, part by part, from the file that `muster advise --output` wrote.

    prediction      computation   bubble + communication   update      data
    measurement     computation   communication + idle     optimizer   data        means over the ranks

A pipeline's ranks wait for messages and for each other, which a measurement cannot tell apart.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.errors import JobFileError, MusterError, NotFoundError
from muster.jobs.basics.reading import SETTINGS_BYTES, read_bytes
from muster.launch.common.fields import real, text
from muster.launch.look.comparison import RunRow

if TYPE_CHECKING:
    from muster.jobs.runfolder.rundir import RunDir
    from muster.jobs.spec.train import TrainSettings
    from muster.launch.sweeps.rows import ChosenRows

MARK: Final = "muster_advice"
PAIRS: Final[Mapping[str, tuple[Sequence[str], Sequence[str]]]] = {  # part: (keys of a prediction, measured parts)
    "computation": (("computation",), ("computation",)),
    "waiting": (("bubble", "communication"), ("communication", "idle")),
    "update": (("update",), ("optimizer",)),
    "data": (("data",), ("data",)),
}
COLUMNS: Final = ("run", "split", "part", "predicted>", "measured>", "error>", "of the step>")


@dataclass(frozen=True)
class PredictedPart:
    """One part of a step, in seconds; the part `step` is the whole."""

    label: str
    plan: str
    part: str
    predicted_s: float
    measured_s: float
    step_s: float

    @property
    def error(self) -> float | None:
        """The prediction's relative error; None if nothing was measured."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s else None


def read_advice(path: Path) -> dict[str, Any]:
    """Read the file of an advice.

    Raises:
        NotFoundError: if there is no such file.
        JobFileError: if the file is not an advice.
    """
    try:
        record = json.loads(read_bytes(path, SETTINGS_BYTES, owned=False))
    except OSError as error:
        raise NotFoundError(f"--advice {path}: {error.strerror}; write it with muster advise --output") from error
    except ValueError as error:
        raise JobFileError(f"--advice {path}: not an advice ({error}); write it with muster advise --output") from error
    if not isinstance(record, dict) or record.get(MARK) != 1 or not isinstance(record.get("rows"), list):
        raise JobFileError(f"--advice {path}: not an advice of this version; write it with muster advise --output")
    return record


def beside(record: Mapping[str, Any], chosen: "ChosenRows") -> list[PredictedPart]:
    """Return the parts of every row whose split the advice predicts, in the order of the rows."""
    found = []
    for row in chosen.rows:
        run = chosen.folders[row.label][0]
        if (told := _prediction(record, run, row.ranks)) is not None:
            found += list(_parts(row, told))
    return found


def table_rows(parts: Sequence[PredictedPart]) -> Iterator[list[str | None]]:
    """Yield the cells of a table."""
    for each in parts:
        error = None if each.error is None else f"{100 * each.error:+.1f} %"
        share = f"{100 * each.measured_s / each.step_s:.0f} %" if each.step_s else None
        times = (f"{1e3 * seconds:.2f} ms" for seconds in (each.predicted_s, each.measured_s))
        yield [each.label, each.plan, each.part, *times, error, share]


def missing(parts: Sequence[PredictedPart], chosen: "ChosenRows") -> list[str]:
    """List rows without a prediction."""
    told = {each.label for each in parts}
    return [
        f"{row.label}: the advice has no prediction of its split; run muster advise for this job"
        for row in chosen.rows
        if row.label not in told
    ]


def _parts(row: RunRow, told: Mapping[str, Any]) -> Iterator[PredictedPart]:
    plan, parts = text(told.get("plan")) or "?", told["parts"]
    whole_s = sum(real(parts.get(key)) or 0.0 for keys, _ in PAIRS.values() for key in keys)
    for part, (keys, measured) in PAIRS.items():
        predicted_s = sum(real(parts.get(key)) or 0.0 for key in keys)
        yield PredictedPart(row.label, plan, part, predicted_s, sum(row.parts_s[name] for name in measured), row.mean_s)
    yield PredictedPart(row.label, plan, "step", whole_s, row.median_s, row.mean_s)


def _prediction(record: Mapping[str, Any], run: "RunDir", ranks: int) -> Mapping[str, Any] | None:
    """Return the row of an advice that splits a run's job as the run did; None if there is none."""
    from pydantic import ValidationError

    from muster.collectives_bench.cost.advice.plans import changed
    from muster.jobs.spec.load import load_job
    from muster.jobs.spec.train import TrainSettings
    from muster.launch.common.kinds import KINDS

    settings = load_job(run.job, KINDS, allow_unread=True).job.settings
    if not isinstance(settings, TrainSettings) or record.get("batch") != settings.batch_size:
        return None
    given, own = settings.model_dump(exclude_unset=True), settings.split(ranks)
    for row in (record.get("best"), *record["rows"]):
        if not isinstance(row, dict) or not isinstance(row.get("parts"), dict):
            continue
        changes = row.get("changes")
        try:
            there = TrainSettings.model_validate(changed(given, changes if isinstance(changes, dict) else {}))
            alike = there.split(ranks) == own and there.bucket_size_mb == settings.bucket_size_mb
            if alike and _tokens(there) == _tokens(settings):
                return row
        except (ValidationError, MusterError):
            continue
    return None


def _tokens(settings: "TrainSettings") -> object:
    """Return the lengths of the slices of a sequence that a job names."""
    return None if settings.parallel is None else settings.parallel.tokens
