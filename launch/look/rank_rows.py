"""A fast reader of the ranks' metrics into arrays: a run of 10,000 steps on 64 ranks has 640,000 rows.

Whole chunks of lines are decoded into typed rows. If a chunk contains an invalid line, such as an incomplete one, the
chunk is read again line by line with the rules of `launch/common/fields.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
import numpy
from numpy.typing import NDArray

from muster.jobs.basics.errors import RunFolderError
from muster.jobs.basics.reading import CHUNK_BYTES, LONGEST_LINE_BYTES, open_file
from muster.launch.common.fields import LARGEST, MOST, number, real, text, typed_line

T = TypeVar("T")
Table: TypeAlias = NDArray[numpy.float64]
Real: TypeAlias = Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST)]
Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0.0, le=LARGEST)]
Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=LARGEST)]
Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MOST)]


class RankRow(msgspec.Struct, gc=False):
    """A step of one rank, times in seconds. The fields are the columns of a `Table`, in this order."""

    step: Whole
    step_s: Positive
    epoch: Whole = 1
    time: Amount = 0.0
    rate: Amount = 0.0
    data_s: Amount = 0.0
    forward_s: Amount = 0.0
    backward_s: Amount = 0.0
    replay_s: Amount = 0.0
    communication_s: Amount = 0.0
    optimizer_s: Amount = 0.0


class LossRow(msgspec.Struct, gc=False):
    """A step that rank 0 recorded for all ranks, or an evaluation."""

    step: Whole
    loss: Real | None = None
    unit: str = ""
    evaluation: bool = False
    step_s: Amount = 0.0
    rate: Amount = 0.0

    @property
    def units(self) -> float:
        """The units of the global batch; 0 if unknown."""
        return self.rate * self.step_s


COLUMN: Final = {name: place for place, name in enumerate(RankRow.__struct_fields__)}
_OF_RANK: Final = msgspec.json.Decoder(RankRow)
_OF_RUN: Final = msgspec.json.Decoder(LossRow)


def read_rank(path: Path) -> Table:
    """Read a rank's steps as a table, one row per step in order. If a step was written twice, the last row counts.

    Raises:
        RunFolderError: if the file cannot be read, or belongs to another user.
    """
    tables = [_table(_rows(chunk, _OF_RANK, _rank_row)) for chunk in _chunks(path)]
    if not tables:
        return numpy.empty((0, len(COLUMN)))
    newest_first = numpy.concatenate(tables)[::-1]
    _, places = numpy.unique(newest_first[:, 0], return_index=True)
    return newest_first[places]


def read_run(path: Path) -> tuple[dict[int, LossRow], str]:
    """Read the newest row of each step of a run, and the unit of its rate. Errors as for `read_rank`."""
    found, unit = dict[int, LossRow](), ""
    for chunk in _chunks(path):
        for row in _rows(chunk, _OF_RUN, _loss_row):
            if not row.evaluation:
                found[row.step], unit = row, row.unit or unit
    return found, unit


def over_ranks(tables: Iterable[Table], sums: Sequence[int], largest: Sequence[int]) -> tuple[Table, int]:
    """Combine the tables of ranks into one, with the steps that all of them have.

    The columns in `sums` are added; the columns in `largest` take the largest value.

    Returns:
        The table, and the number of ranks.
    """
    whole, ranks = numpy.empty((0, len(COLUMN))), 0
    for ranks, table in enumerate(tables, 1):
        if ranks == 1:
            whole = table.copy()
            continue
        _, ours, theirs = numpy.intersect1d(whole[:, 0], table[:, 0], assume_unique=True, return_indices=True)
        whole, table = whole[ours], table[theirs]
        whole[:, sums] += table[:, sums]
        whole[:, largest] = numpy.maximum(whole[:, largest], table[:, largest])
    return whole, ranks


def _chunks(path: Path) -> Iterator[bytes]:
    """Yield a file in chunks of complete lines. An unterminated last line and overlong lines are omitted."""
    try:
        with open_file(path) as file:
            while data := file.read(CHUNK_BYTES):
                data += file.readline(LONGEST_LINE_BYTES)
                yield data[: data.rfind(b"\n") + 1]
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be read: {(error.strerror or 'unknown reason').lower()}") from error


def _table(rows: list[RankRow]) -> Table:
    values = chain.from_iterable(map(msgspec.structs.astuple, rows))
    return numpy.fromiter(values, float, len(rows) * len(COLUMN)).reshape(-1, len(COLUMN))


def _rows(chunk: bytes, lines: msgspec.json.Decoder[T], by_line: Callable[[dict[str, Any]], T | None]) -> list[T]:
    for wrong, right in ((b"", b""), (b": NaN", b": null")):  # a loss may be NaN, which is not valid JSON
        try:
            return lines.decode_lines(chunk.replace(wrong, right) if wrong else chunk)
        except (msgspec.DecodeError, RecursionError):
            continue
    records = (typed_line(line) for line in chunk.splitlines() if line.startswith(b"{"))
    return [row for record in records if (row := by_line(record)) is not None]


def _rank_row(record: dict[str, Any]) -> RankRow | None:
    step, seconds = number(record.get("step"), least=1), real(record.get("step_s"))
    if step is None or seconds is None or seconds <= 0.0:
        return None
    others = (max(real(record.get(name)) or 0.0, 0.0) for name in list(COLUMN)[3:])
    return RankRow(step, seconds, number(record.get("epoch"), least=1) or 1, *others)


def _loss_row(record: dict[str, Any]) -> LossRow | None:
    step = number(record.get("step"), least=1)
    if step is None:
        return None
    work = (max(real(record.get(name)) or 0.0, 0.0) for name in ("step_s", "rate"))
    return LossRow(step, real(record.get("loss")), text(record.get("unit")) or "", "evaluation" in record, *work)
