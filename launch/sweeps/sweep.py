"""A sweep: the product of grids, as runs of one job; its points and its record. Pure, except for the record's file.

--grid train.mode=allreduce,ddp --grid nodes=1,2    4 points: every value of one with every value of the other

runs/sweep-<name>-<utc>/sweep.json      the points, their overrides, and their runs, which are beside this folder
"""

import itertools
import math
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

VERSION: Final = 1
MOST_POINTS: Final = 1000  # Slurm's own limit for an array, unless the site has raised it
PREFIX: Final = "sweep-"
RECORD: Final = "sweep.json"
LONGEST_NAME: Final = 64
NOT_GRIDS: Final = {"name": "the runs are named after their points; name the sweep with --name"}
SHOWN: Final = ("code", "class", "seconds", "step", "steps", "loss", "unit", "message")
RATES: Final = ("rate", "rate_low", "rate_high", "rate_steps")
BRACKETS: Final = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True)
class Grid:
    """One key of the job and its values, as they were written."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its number from 0, its overrides, and the name of its run."""

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
    points: tuple[Point, ...]
    run_ids: tuple[str, ...]

    def write(self, folder: Path) -> None:
        """Write the record. Errors as for `jobs.runfolder.rundir.write_json`."""
        points = [{**asdict(point), "run_id": run_id} for point, run_id in zip(self.points, self.run_ids, strict=True)]
        head = {"version": VERSION, "name": self.name, "job": self.job, "transport": self.transport}
        write_json(folder / RECORD, {**head, "time": self.time, "points": points})

    @classmethod
    def read(cls, folder: Path) -> "SweepRecord":
        """Read the record.

        Raises:
            RunFolderError: if there is none, or it cannot be used.
        """
        path = folder / RECORD
        try:
            record = read_json(path)
            if record["version"] != VERSION:
                raise RunFolderError(f"{path}: is version {record['version']}; this Muster reads version {VERSION}")
            rows = record["points"]
            points = tuple(
                Point(int(row["index"]), tuple(map(str, row["overrides"])), str(row["name"])) for row in rows
            )
            run_ids = tuple(str(row["run_id"]) for row in rows)
            if not all(RUN_ID.fullmatch(each) for each in run_ids):
                raise ValueError("not the name of a run")
            name, job, transport = (str(record[key]) for key in ("name", "job", "transport"))
            return cls(name, job, transport, float(record["time"]), points, run_ids)
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise RunFolderError(f"{path}: cannot be read: {error!r}; start the sweep anew") from error

    def runs(self, folder: Path) -> list[RunDir]:
        """Return the run folders, which are beside the sweep's folder; they may not exist yet.

        Raises:
            UntrustedError: if one belongs to another user.
        """
        runs = [RunDir(folder.parent / run_id) for run_id in self.run_ids]
        for run in runs:
            if os.path.lexists(run.path):
                check_folder(run.path)
        return runs


def read_grids(words: Sequence[str], repeats: int = 1) -> list[Grid]:
    """Read the `--grid` options; a sweep that only repeats needs none.

    Raises:
        UsageError: if one is not `key=value,value`, or they make too many points; names all mistakes at once.
    """
    grids: list[Grid] = []
    mistakes: list[str] = []
    for word in words:
        try:
            grid = read_grid(word)
            if any(grid.key == other.key for other in grids):
                raise UsageError(f"--grid {word}: {grid.key} has a grid already; give all its values in one")
            grids.append(grid)
        except UsageError as error:
            mistakes.append(str(error))
    if not words and repeats == 1:
        mistakes.append("--grid: none is given; expected KEY=VALUE,VALUE, such as --grid nodes=1,2,4")
    if (count := repeats * math.prod(len(grid.values) for grid in grids)) > MOST_POINTS:
        mistakes.append(
            f"--grid: together they make {count} runs, at most {MOST_POINTS} are allowed; give fewer values"
        )
    if mistakes:
        raise UsageError("\n".join(mistakes))
    return grids


def read_grid(word: str) -> Grid:
    """Read one `--grid` option; a comma inside brackets or quotes belongs to the value.

    Raises:
        UsageError: if it is not `key=value,value`.
    """
    key, equals, text = word.partition("=")
    if not equals or not all(key.split(".")):
        raise UsageError(f"--grid {word}: must be of the form KEY=VALUE,VALUE, such as --grid train.mode=allreduce,ddp")
    if key in NOT_GRIDS:
        raise UsageError(f"--grid {word}: {key} cannot be a grid: {NOT_GRIDS[key]}")
    values = split_values(text)
    if not all(values):
        place = f"value {values.index('') + 1} of {len(values)} is empty" if len(values) > 1 else "has no value"
        raise UsageError(f"--grid {word}: {place}; separate values by commas, and write '\"\"' for an empty text")
    if twice := next((value for value in values if values.count(value) > 1), None):
        raise UsageError(f"--grid {word}: {twice} is given twice; every point would run twice")
    return Grid(key, tuple(values))


def split_values(text: str) -> list[str]:
    """Split at commas, but not inside brackets or quotes; an unclosed one extends to the end."""
    values, open_, quote = [""], "", ""
    for each in text:
        if quote:
            quote = "" if each == quote else quote
        elif each in "'\"" and not values[-1].strip(" [{(,:"):
            quote = each
        elif each in BRACKETS:
            open_ += BRACKETS[each]
        elif open_ and each == open_[-1]:
            open_ = open_[:-1]
        if each == "," and not quote and not open_:
            values.append("")
        else:
            values[-1] += each
    return [value.strip() for value in values]


def points_of(grids: Sequence[Grid], base: str, repeats: int = 1) -> list[Point]:
    """Return the product of the grids, the last one varying fastest; every name begins with `base`.

    Repeats are separate points. All points run once before any runs again, so that a drift of the machine affects all
    of them.
    """
    points: list[Point] = []
    taken: set[str] = set()
    product = list(itertools.product(*(grid.values for grid in grids)))
    for index, values in enumerate(product * repeats):
        pairs = [(grid.key, value) for grid, value in zip(grids, values, strict=True)]
        again = [("", f"again-{index // len(product)}")] if index >= len(product) else []
        name = point_name(base, [*pairs, *again], index, taken)
        taken.add(name)
        points.append(Point(index, tuple(f"{key}={value}" for key, value in pairs), name))
    return points


def point_name(base: str, pairs: Iterable[tuple[str, str]], index: int, taken: set[str]) -> str:
    """Return a readable name for a point's run, such as vgg11-mode-ddp-nodes-2; if it is cut, it ends in a number."""
    words = [f"{key.rpartition('.')[2]}-{value}" if key else value for key, value in pairs]
    name = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join([base, *words])).strip("-._")
    if len(name) <= LONGEST_NAME and name not in taken:
        return name
    for ending in (f"-{number}" for number in itertools.chain([index], itertools.count(MOST_POINTS))):
        numbered = name[: LONGEST_NAME - len(ending)].rstrip("-._") + ending
        if numbered not in taken:
            break
    return numbered


def complaint(bad: Sequence[tuple[Point, MusterError]], grids: Sequence[Grid], all_points: int) -> MusterError:
    """Combine the errors of points: an error of a single value is reported once, any other one with its points."""
    spelt = {f"{grid.key}={value}": (grid.key, value) for grid in grids for value in grid.values}
    of_values: dict[tuple[str, str], list[str]] = {}
    of_points: dict[str, list[Point]] = {}
    for point, error in bad:
        for line in str(error).splitlines():
            # A value that merely does not fit the others is refused only in some of its points.
            alone = point.overrides if isinstance(error, JobFileError) else ()
            override = next((each for each in alone if line.startswith(f"--set {each}: ")), None)
            if override is None:
                of_points.setdefault(line, []).append(point)
                continue
            key, value = spelt[override]
            values = of_values.setdefault((key, line.removeprefix(f"--set {override}: ")), [])
            values += [value] if value not in values else []
    lines = [f"--grid {key}={','.join(values)}: {text}" for (key, text), values in of_values.items()]
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


def find_sweep(root: Path, given: str, *, unique: bool = False) -> Path:
    """Find a sweep's folder by path, name, or part of its name; if several match, the newest.

    Raises:
        NotFoundError: if none matches.
        UsageError: if several match and `unique` is set.
    """
    if os.path.isfile(os.path.join(given, RECORD)):  # noqa: PTH113, PTH118 (False if it is closed)
        return open_run(Path(given)).path
    sweeps = sorted(path.parent for path in root.glob(f"{PREFIX}*/{RECORD}"))
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
    """Return the sweep that a word names, or None if it names a run. Errors as for `find_sweep`."""
    name = Path(given or "").name
    if given is None or not name.startswith(PREFIX) or any(name in run.run_id for run in all_runs(root)):
        return None
    return find_sweep(root, given, unique=True)


def exit_code(codes: Sequence[int | None]) -> int:
    """Return a sweep's exit code: that of the first failed point; a point that never ran counts as 1."""
    return next((1 if code is None else code for code in codes if code != 0), 0)


def summary(point: Point, state: Any) -> dict[str, Any]:
    """Return a point's row of the table; `state` is its RunState, None if its run has no folder."""
    known = {} if state is None else state.to_json()
    head = {"point": point.label, "run_id": known.get("run_id"), "state": "not run" if state is None else state.label}
    return head | {key: known.get(key) for key in SHOWN + RATES}


def say(text: str) -> None:
    """Print one message on standard error, apart from the data on standard output."""
    print(text, file=sys.stderr, flush=True)
