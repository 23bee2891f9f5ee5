"""The `--grid` and `--zip` options of a sweep: keys of the job, each with values.

--grid train.mode=allreduce,ddp --grid nodes=1,2    4 points: every combination of the values
--zip nodes=1,2,4 train.batch_size=64,128,256       3 points: the first values, the second, the third (weak scaling)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from muster.jobs.basics.errors import UsageError

MOST_POINTS: Final = 1000  # maximum number of points: Slurm's default limit for an array
NOT_GRIDS: Final = {"name": "the runs are named after their points; name the sweep with --name"}
BRACKETS: Final = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True)
class SweptKey:
    """One key of the job, and the values of its grid as typed on the command line."""

    key: str
    values: tuple[str, ...]

    option = "--grid"

    @property
    def keys(self) -> "tuple[SweptKey, ...]":
        """The keys that vary together: this one."""
        return (self,)


@dataclass(frozen=True)
class ZippedKeys:
    """Keys of the job that vary together: the first values of all, then the second values, and so on (`--zip`)."""

    keys: tuple[SweptKey, ...]
    option = "--zip"


Axis = SweptKey | ZippedKeys


def read_grids(words: Sequence[str], repeats: int = 1, zips: Sequence[Sequence[str]] = ()) -> list[Axis]:
    """Read the `--grid` and `--zip` options. A sweep that only repeats the job needs none.

    Raises:
        UsageError: if an option is not of the form `key=value,value`, a key is given twice, zipped keys differ in
            their numbers of values, or there are too many points. The message lists all mistakes.
    """
    axes: list[Axis] = []
    mistakes: list[str] = []
    taken: set[str] = set()
    for option, group in [("--grid", [word]) for word in words] + [("--zip", [*group]) for group in zips]:
        keys = []
        for word in group:
            try:
                grid = read_grid(word, option)
                if grid.key in taken:
                    raise UsageError(f"{option} {word}: {grid.key} already has values; give all of them in one option")
                taken.add(grid.key)
                keys.append(grid)
            except UsageError as error:
                mistakes.append(str(error))
        if len({len(grid.values) for grid in keys}) > 1:
            counts = ", ".join(f"{grid.key} has {len(grid.values)}" for grid in keys)
            mistakes.append(f"--zip {' '.join(group)}: needs equally many values for each key: {counts}")
        elif len({*zip(*(grid.values for grid in keys), strict=True)}) < len(keys[0].values if keys else ()):
            mistakes.append(f"--zip {' '.join(group)}: has the same values twice; every point would run twice")
        axes += [ZippedKeys(tuple(keys))] if option == "--zip" and keys else keys
    if not words and not zips and repeats == 1:
        mistakes.append("--grid: is missing; expected KEY=VALUE,VALUE, such as --grid nodes=1,2,4")
    if (count := repeats * math.prod(len(axis.keys[0].values) for axis in axes)) > MOST_POINTS:
        mistakes.append(f"--grid: the grids make {count} runs, more than the limit of {MOST_POINTS}; give fewer values")
    if mistakes:
        raise UsageError("\n".join(mistakes))
    return axes


def read_grid(word: str, option: str = "--grid") -> SweptKey:
    """Read one key of a `--grid` or `--zip` option; a comma inside brackets or quotes belongs to the value.

    Raises:
        UsageError: if `word` is not of the form `key=value,value`.
    """
    key, equals, text = word.partition("=")
    if not equals or not all(key.split(".")):
        raise UsageError(
            f"{option} {word}: must be of the form KEY=VALUE,VALUE, such as --grid train.mode=allreduce,ddp"
        )
    if key in NOT_GRIDS:
        raise UsageError(f"{option} {word}: {key} cannot be a grid: {NOT_GRIDS[key]}")
    values = split_values(text)
    if not all(values):
        place = f"value {values.index('') + 1} of {len(values)} is empty" if len(values) > 1 else "has no value"
        raise UsageError(f"{option} {word}: {place}; separate values by commas, and write '\"\"' for an empty text")
    if option == "--grid" and (twice := next((value for value in values if values.count(value) > 1), None)):
        raise UsageError(f"{option} {word}: {twice} is given twice; every point would run twice")
    return SweptKey(key, tuple(values))


def split_values(text: str) -> list[str]:
    """Split at commas outside brackets and quotes. An unclosed bracket or quote extends to the end."""
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


def settings_of(axis: Axis) -> list[tuple[tuple[str, str], ...]]:
    """Return the settings of an axis in order, each as pairs of key and value."""
    return list(zip(*([(grid.key, value) for value in grid.values] for grid in axis.keys), strict=True))
