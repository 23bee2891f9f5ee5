"""The points and the record of a sweep, which runs one job with every combination of values from several grids.

runs/sweep-<name>-<utc>/sweep.json      the points with their overrides and run ids; the run folders lie beside this one
"""

import itertools
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.errors import JobFileError, MusterError, NotFoundError, RunFolderError, UsageError
from muster.jobs.basics.files import write_json
from muster.jobs.basics.ownership import check_folder
from muster.jobs.basics.reading import read_json
from muster.jobs.runfolder.rundir import RUN_ID, RunDir, all_runs, note_choice, open_run, run_path
from muster.launch.sweeps.grids import MOST_POINTS, Axis, settings_of

VERSION: Final = 1
PREFIX: Final = "sweep-"
RECORD: Final = "sweep.json"
LONGEST_NAME: Final = 64
SHOWN: Final = ("code", "class", "seconds", "step", "steps", "loss", "unit", "message")
RATES: Final = ("rate", "rate_low", "rate_high", "rate_steps")


@dataclass(frozen=True)
class SweepPoint:
    """One run of a sweep; `index` counts from 0."""

    index: int
    overrides: tuple[str, ...]
    name: str

    @property
    def label(self) -> str:
        """The overrides as text."""
        return " ".join(self.overrides)


@dataclass(frozen=True)
class SweepRecord:
    """The content of `sweep.json`; `run_ids` is in the order of the points."""

    name: str
    job: str
    transport: str
    time: float
    points: tuple[SweepPoint, ...]
    run_ids: tuple[str, ...]

    def write(self, folder: Path) -> None:
        """Write the record. Errors as for `jobs.basics.files.write_json`."""
        points = [{**asdict(point), "run_id": run_id} for point, run_id in zip(self.points, self.run_ids, strict=True)]
        head = {"version": VERSION, "name": self.name, "job": self.job, "transport": self.transport}
        write_json(folder / RECORD, {**head, "time": self.time, "points": points})

    @classmethod
    def read(cls, folder: Path) -> "SweepRecord":
        """Read the record.

        Raises:
            RunFolderError: if the record is missing, unreadable, or of another version.
        """
        path = folder / RECORD
        try:
            record = read_json(path)
            if record["version"] != VERSION:
                raise RunFolderError(f"{path}: has version {record['version']}; this Muster reads version {VERSION}")
            rows = record["points"]
            points = tuple(
                SweepPoint(int(row["index"]), tuple(map(str, row["overrides"])), str(row["name"])) for row in rows
            )
            run_ids = tuple(str(row["run_id"]) for row in rows)
            if not all(RUN_ID.fullmatch(each) for each in run_ids):
                raise ValueError("not the name of a run")
            name, job, transport = (str(record[key]) for key in ("name", "job", "transport"))
            return cls(name, job, transport, float(record["time"]), points, run_ids)
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise RunFolderError(f"{path}: cannot be read: {error!r}; start the sweep again") from error

    def runs(self, folder: Path) -> list[RunDir]:
        """Return the run folders, which are beside the sweep's folder; they may not exist yet.

        Raises:
            UntrustedError: if a run folder belongs to another user.
        """
        runs = [RunDir(folder.parent / run_id) for run_id in self.run_ids]
        for run in runs:
            if os.path.lexists(run.path):
                check_folder(run.path)
        return runs

    def counts(self, states: Sequence[Any]) -> str:
        """Return the number of points in each state, such as "2 done, 1 failed". `states`: as for `summary`."""
        labels = ["not run" if state is None else state.label for state in states]
        return ", ".join(f"{labels.count(label)} {label}" for label in dict.fromkeys(labels))


def points_of(axes: Sequence[Axis], base: str, repeats: int = 1) -> list[SweepPoint]:
    """Return a point for each combination of the axes' values, the last axis varying fastest. Names begin with `base`.

    Repeats are separate points. All points run once before any runs again, so that drift of the machine affects all
    points equally.
    """
    points: list[SweepPoint] = []
    taken: set[str] = set()
    product = list(itertools.product(*(settings_of(axis) for axis in axes)))
    for index, settings in enumerate(product * repeats):
        pairs = list(itertools.chain.from_iterable(settings))
        again = [("", f"again-{index // len(product)}")] if index >= len(product) else []
        name = point_name(base, [*pairs, *again], index, taken)
        taken.add(name)
        points.append(SweepPoint(index, tuple(f"{key}={value}" for key, value in pairs), name))
    return points


def point_name(base: str, pairs: Iterable[tuple[str, str]], index: int, taken: set[str]) -> str:
    """Return a readable name such as vgg11-mode-ddp-nodes-2. A shortened or duplicate name ends in a number."""
    words = [f"{key.rpartition('.')[2]}-{value}" if key else value for key, value in pairs]
    name = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join([base, *words])).strip("-._")
    if len(name) <= LONGEST_NAME and name not in taken:
        return name
    for ending in (f"-{number}" for number in itertools.chain([index], itertools.count(MOST_POINTS))):
        numbered = name[: LONGEST_NAME - len(ending)].rstrip("-._") + ending
        if numbered not in taken:
            break
    return numbered


def complaint(bad: Sequence[tuple[SweepPoint, MusterError]], axes: Sequence[Axis], all_points: int) -> MusterError:
    """Combine the errors of points. An error caused by a single value is reported once, others with their points."""
    spelt = {
        f"{grid.key}={value}": (f"{axis.option} {grid.key}", value)
        for axis in axes
        for grid in axis.keys
        for value in grid.values
    }
    of_values: dict[tuple[str, str], list[str]] = {}
    of_points: dict[str, list[SweepPoint]] = {}
    for point, error in bad:
        for line in str(error).splitlines():
            # An invalid value fails in every point that has it; an invalid combination fails only in some of them.
            alone = point.overrides if isinstance(error, JobFileError) else ()
            override = next((each for each in alone if line.startswith(f"--set {each}: ")), None)
            if override is None:
                of_points.setdefault(line, []).append(point)
                continue
            key, value = spelt[override]
            values = of_values.setdefault((key, line.removeprefix(f"--set {override}: ")), [])
            values += [value] if value not in values else []
    lines = [f"{key}={','.join(values)}: {text}" for (key, text), values in of_values.items()]
    for line, points in of_points.items():
        labels = "; ".join(point.label for point in points)
        lines.append(line if len(points) == all_points else f"point {labels}: {line}")
    error = JobFileError("\n".join(lines))
    codes = [each.exit_code for _, each in bad]
    error.exit_code = JobFileError.exit_code if JobFileError.exit_code in codes else codes[0]
    return error


def sweep_path(root: Path, name: str) -> Path:
    """Return the folder for a new sweep, in the folder of all runs. Nothing is created."""
    return run_path(root, PREFIX + name)


def sweeps_in(root: Path) -> list[Path]:
    """List the folders of all users that look like sweeps."""
    return sorted(path.parent for path in root.glob(f"{PREFIX}*/{RECORD}"))


def find_sweep(root: Path, given: str, *, unique: bool = False) -> Path:
    """Find a sweep's folder by path, name, or part of its name. If several match, return the newest.

    Raises:
        NotFoundError: if no sweep matches.
        UsageError: if several sweeps match and `unique` is set.
    """
    if os.path.isfile(os.path.join(given, RECORD)):  # noqa: PTH113, PTH118 (False if it is closed)
        return open_run(Path(given)).path
    sweeps = sweeps_in(root)
    found = [path for path in sweeps if path.name == given] or [path for path in sweeps if given in path.name]
    if not found:
        names = ", ".join(path.name for path in sweeps[-4:]) or "none"
        raise NotFoundError(f"{root}: no sweep named {given!r}; found: {names}")
    if unique and len(found) > 1:
        names = ", ".join(path.name for path in found[-4:])
        raise UsageError(f"{root}: {given!r} matches {len(found)} sweeps: {names}; give more of the name")
    newest = max(found, key=lambda path: path.name.rsplit("-", 2)[-2:])
    note_choice(given, newest.name, len(found), "sweep")
    return open_run(newest).path


def named_sweep(root: Path, given: str | None) -> Path | None:
    """Return the folder of the sweep named by `given`, or None if `given` names a run. Errors as for `find_sweep`."""
    name = Path(given or "").name
    if given is None or not name.startswith(PREFIX) or any(name in run.run_id for run in all_runs(root)):
        return None
    return find_sweep(root, given, unique=True)


def exit_code(codes: Sequence[int | None]) -> int:
    """Return the exit code of the first failed point. A point that never ran has code 1."""
    return next((1 if code is None else code for code in codes if code != 0), 0)


def summary(point: SweepPoint, state: Any) -> dict[str, Any]:
    """Return a point's row of the table. `state` is its RunState, or None if its run has no folder."""
    known = {} if state is None else state.to_json()
    head = {"point": point.label, "run_id": known.get("run_id"), "state": "not run" if state is None else state.label}
    return head | {key: known.get(key) for key in SHOWN + RATES}


def say(text: str) -> None:
    """Print one message on standard error, apart from the data on standard output."""
    print(text, file=sys.stderr, flush=True)
