"""Read the rows of a log, those that a large run has for every node and rank ten times as fast as `typed` does.

The types below have the bounds of `fields.FIELDS`. A row with any other event, field or value is left to `typed`.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

import msgspec

from muster.jobs.basics.files import lines_of
from muster.jobs.basics.reading import LATEST_S, parse_json
from muster.jobs.machine.linux import signal_name
from muster.launch.common.fields import LONGEST_TEXT, MOST, MOST_ATTEMPTS, MOST_LINES, MOST_PIDS, MOST_RANKS, typed

Moment: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=LATEST_S)]
Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]
Attempt: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MOST_ATTEMPTS)]
Pid: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=MOST_PIDS)]
Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MOST)]
Code: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 16), lt=1 << 16)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)]
SIGNALS: Final = tuple(signal_name(number) for number in range(1, 65))


class _EventRow(msgspec.Struct, tag_field="event", forbid_unknown_fields=True, gc=False):
    may_be_null: ClassVar[tuple[str, ...]] = ()

    time: Moment
    attempt: Attempt


class _Started(_EventRow, tag="started"):
    node: Rank
    host: Text
    ranks: Annotated[list[tuple[Rank, Pid]], msgspec.Meta(max_length=MOST_RANKS)]
    ticks: Annotated[list[tuple[Rank, Whole]], msgspec.Meta(max_length=MOST_RANKS)]


class _Exited(_EventRow, tag="exited"):
    may_be_null = ("rank", "code", "signal", "step")

    rank: Rank | None
    node: Rank
    host: Text
    code: Code | None
    signal: Literal[SIGNALS] | None  # type: ignore[valid-type]
    ended: Moment
    cause: Text
    message: Text
    last_lines: Annotated[list[Text], msgspec.Meta(max_length=MOST_LINES)]
    ours: bool
    step: Whole | None
    hung: bool


_decoder = msgspec.json.Decoder(_Started | _Exited)


def decoded(line: bytes) -> dict[str, object] | None:
    """Return the row in a line as `typed` does, or None if the row is not one of these."""
    try:
        row = _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    found = {"event": row.__struct_config__.tag, **msgspec.structs.asdict(row)}
    for name in row.may_be_null:
        if found[name] is None:
            del found[name]
    return found


def typed_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the typed records of a log. Errors as for `jobs.basics.files.read_lines`."""
    for line in lines_of(path):
        if (row := decoded(line)) is None:
            with suppress(ValueError):  # skip damaged lines, which a full disk can cause
                row = typed(parse_json(line))
        if row is not None:
            yield row
