"""The types and bounds of values in a run's records, which every reader checks before it uses a value.

    {"rank": 3, "time": 1e400, "world_size": 3e9, "host": ["a"], "code": 1}      as it is in the file
    {"rank": 3, "code": 1}                                                       as its readers get it

A value with the wrong type or out of bounds is dropped, as if it were missing. Readers handle missing values.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from muster.jobs.basics.reading import LATEST_S, parse_json
from muster.jobs.machine.linux import signal_number

MOST_RANKS: Final = 100_000  # rank numbers in file names have five digits
MOST_ATTEMPTS: Final = 10_000
MOST_PIDS: Final = 1 << 22  # the kernel's limit for process ids
MOST: Final = 1 << 53  # floats represent all integers up to this one exactly
LARGEST: Final = 1e100  # products and sums of smaller numbers stay finite
LONGEST_TEXT: Final = 1 << 13
MOST_LINES: Final = 1000


def number(value: Any, most: int = MOST, least: int = -MOST) -> int | None:
    """Return a record's value if it is a whole number within bounds, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most else None


def real(value: Any) -> float | None:
    """Return a record's value as a float if it is a finite number, else None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if -LARGEST <= value <= LARGEST else None


def below(most: int, least: int = 0) -> Callable[[Any], int | None]:
    """Return a reader that accepts whole numbers from `least` up to, but not including, `most`."""
    return lambda value: number(value, most - 1, least)


def moment(value: Any) -> float | None:
    """Return a time in Unix seconds if a calendar date can represent it, else None."""
    seconds = real(value)
    return seconds if seconds is not None and 0 <= seconds <= LATEST_S else None


def text(value: Any) -> str | None:
    """Return a string, cut to LONGEST_TEXT characters; None for any other type."""
    return value[:LONGEST_TEXT] if isinstance(value, str) else None


def texts(value: Any) -> list[str] | None:
    """Return the strings in a list; None for any other type."""
    if not isinstance(value, list):
        return None
    return [each for item in value[:MOST_RANKS] if (each := text(item)) is not None]


def plain(value: Any) -> Any:
    """Return a valid scalar unchanged; None for a container or an invalid scalar."""
    if isinstance(value, bool):
        return value
    return text(value) if isinstance(value, str) else number(value) if isinstance(value, int) else real(value)


def reals(value: Any) -> dict[str, float] | None:
    """Return a mapping from names to numbers; None if any value is not a number."""
    found = {name: real(each) for name, each in value.items()} if isinstance(value, dict) else {"": None}
    return None if None in found.values() else found  # type: ignore[return-value]


def list_of(shape: Any, most: int) -> Callable[[Any], list[Any] | None]:
    """Return a reader that accepts a list of at most `most` items, each of the given shape."""
    return lambda value: value if isinstance(value, list) and len(value) <= most and fits(value, [shape]) else None


def pair(value: Any) -> list[float] | None:
    """Return a list of two numbers; None for anything else."""
    return value if fits(value, [real]) and len(value) == 2 else None


def _loss(value: Any) -> float | None:
    return value if isinstance(value, float) and not math.isfinite(value) else real(value)


def _signal(value: Any) -> str | None:
    try:
        return value if isinstance(value, str) and 0 < signal_number(value) <= 64 else None
    except (KeyError, ValueError):
        return None


def _by_rank(reader: Callable[[Any], int | None]) -> Callable[[Any], list[list[int]] | None]:
    """Return a reader for a list of [rank, number] pairs, which drops invalid pairs."""

    def read(value: Any) -> list[list[int]] | None:
        if not isinstance(value, list):
            return None
        items = (item for item in value[:MOST_RANKS] if isinstance(item, list) and len(item) == 2)
        return [[one, other] for a, b in items if (one := _rank(a)) is not None and (other := reader(b)) is not None]

    return read


def _record(value: Any) -> dict[str, Any] | None:
    return typed(value) if isinstance(value, dict) else None


def _records(value: Any) -> list[dict[str, Any]] | None:
    if not isinstance(value, list):
        return None
    return [typed(item) for item in value[:MOST_RANKS] if isinstance(item, dict)]


def _raw_records(value: Any) -> list[Any] | None:
    """Return records that their own reader checks (`launch/records/runrows.py`)."""
    return value[:MOST_LINES] if isinstance(value, list) else None


def _lines(value: Any) -> list[str] | None:
    return texts(value[-MOST_LINES:]) if isinstance(value, list) else None


_rank, _pid, _whole = below(MOST_RANKS), below(MOST_PIDS, 1), below(MOST)

_TEXTS: Final = (
    "event run_id name kind transport host unit text message class cause reason by why next next_step mode from "
    "checkpoint job master_addr phase device continue_with"
)
_WHOLE: Final = (
    "pid_start step steps epoch from_step last_step saved_step lost_steps compared restarts master_port in_place redone"
)
_REALS: Final = "seconds delay_s deadline_s grace_s rate worst"
FIELDS: Final[Mapping[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(_TEXTS.split(), text),
    **dict.fromkeys(_WHOLE.split(), _whole),
    **dict.fromkeys(_REALS.split(), real),
    **dict.fromkeys(("time", "started", "ended"), moment),
    **dict.fromkeys(("rank", "node"), _rank),
    **dict.fromkeys(("world_size", "nodes"), below(MOST_RANKS + 1)),
    "attempt": below(MOST_ATTEMPTS),
    "code": below(1 << 16, -(1 << 16)),
    "pid": _pid,
    "loss": _loss,
    "signal": _signal,
    "ranks": _by_rank(_pid),
    "ticks": _by_rank(_whole),
    "times": reals,
    "hosts": texts,
    "last_lines": _lines,
    "first": _record,
    "victims": _records,
    "more_victims": texts,
    "stragglers": _raw_records,
}


def fits(value: Any, shape: Any) -> bool:
    """Return whether a value matches a shape: a reader, [shape] for a list of items, or {key: shape} for a mapping.

    A key that ends in a question mark may be missing.
    """
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(item, shape[0]) for item in value)
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(
            fits(value[key], each) if (key := name.rstrip("?")) in value else key != name
            for name, each in shape.items()
        )
    return shape(value) is not None


def optional(reader: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a reader that also accepts null."""
    return lambda value: value is None or reader(value)


def typed(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without the values whose type or bounds are wrong for their names."""
    found = ((key, FIELDS.get(key, plain)(value)) for key, value in row.items() if value is not None)
    return {key: value for key, value in found if value is not None}


def typed_line(line: bytes) -> dict[str, Any]:
    """Parse one line of a log into a typed record; {} for an invalid line."""
    try:
        row = parse_json(line)
    except ValueError:  # a full disk can truncate a line
        return {}
    return typed(row) if isinstance(row, dict) else {}
