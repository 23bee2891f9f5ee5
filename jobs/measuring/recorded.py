"""Files of measurements: one record per line while ranks measure, one JSON file for a whole result, CSV for its rows.

    a run folder    the bench.jsonl of its newest attempt that has one is read
    bench.jsonl     one record per line; the last may be incomplete, because the run may still be writing or have died
    result.json     one object, with the format's mark and version

All input is validated.
"""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from muster.jobs.basics.errors import JobFileError, NotFoundError, RunFolderError
from muster.jobs.basics.files import write_text
from muster.jobs.basics.reading import LARGEST, parse_json, read_bytes
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.strict import Strict, UnixTime

MOST_BYTES: Final = 1 << 31  # a result contains every sample; Muster writes no larger file

Record = TypeVar("Record", bound=BaseModel)
Whole = TypeVar("Whole", bound=BaseModel)
Model = TypeVar("Model", bound=BaseModel)


class End(Strict):
    """The last record of a job that completed all its measurements."""

    record: Literal["end"] = "end"
    seconds: float
    time: UnixTime


@dataclass(frozen=True)
class Format(Generic[Record, Whole]):
    """The file format of a command: its records by name, and the type of a whole result."""

    command: str
    mark: str  # top-level key of a file that is one complete result; its value is the version
    version: int
    header: str  # the record with the version, in a file with one record per line
    records: Mapping[str, type[Record]]  # {key: type of the record}; empty if every file is one result
    whole: type[Whole]
    gather: Callable[[Sequence[Record]], Whole | None]  # None: no result yet

    def parse(self, line: bytes) -> Record | None:
        """Parse one line; return None if it is incomplete, or is not a known record."""
        try:
            return self.records[parse_json(line)["record"]].model_validate_json(line)
        except (ValueError, KeyError, TypeError):  # pydantic's errors are ValueErrors
            return None

    def read(self, path: Path) -> Whole:
        """Read the result of a run folder or of a file, which has records or a whole result.

        Raises:
            RunFolderError: if the file does not exist, or the folder has no measurements.
            JobFileError: if the file is not a result, is empty or damaged, or was written by another version.
        """
        file = newest(path) if path.is_dir() else path
        try:
            data = read_bytes(file, MOST_BYTES, owned=False)
        except OSError as error:
            kind = NotFoundError if isinstance(error, FileNotFoundError) else RunFolderError
            raise kind(f"{file}: {error.strerror}; name a run of {self.command}, or a file that it wrote") from error
        except ValueError as error:
            raise JobFileError(f"{error}; name a result of {self.command}") from error
        found = self.gather(self._lines(file, data)) if self._is_lines(data) else self._whole(file, data)
        if found is None:
            raise JobFileError(f"{path}: has no measurements; name a run of {self.command}")
        return found

    def _is_lines(self, data: bytes) -> bool:
        """Return True if a file has one record per line; otherwise the whole file is one result."""
        if not self.records:
            return False
        try:
            first = parse_json(data.lstrip().partition(b"\n")[0])
        except ValueError:
            return False
        return isinstance(first, dict) and self.mark not in first

    def _whole(self, file: Path, data: bytes) -> Whole:
        content = _json(file, data, "")
        if not isinstance(content, dict) or self.mark not in content:
            raise JobFileError(
                f"{file}: not a result of {self.command} (no {self.mark} in it); name a result file or a run"
            )
        self._check_version(file, content[self.mark])
        return _valid(file, self.whole, data, "")

    def _lines(self, file: Path, data: bytes) -> list[Record]:
        found = []
        lines = data.split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found.append(self._record(file, line, f"line {number}: "))
            except JobFileError:
                if number == len(lines):  # a last line without a line end is incomplete
                    break
                raise
        return found

    def _record(self, file: Path, line: bytes, place: str) -> Record:
        content = _json(file, line, place)
        name = content.get("record") if isinstance(content, dict) else None
        if not isinstance(name, str) or name not in self.records:
            raise JobFileError(f"{file}: {place}not a record of {self.command}; name a result of {self.command}")
        if name == self.header:
            self._check_version(file, content.get("version", self.version))
        return _valid(file, self.records[name], line, place)

    def _check_version(self, file: Path, version: Any) -> None:
        if version != self.version:
            raise JobFileError(
                f"{file}: written as version {version!r}, but this muster reads version {self.version}; "
                "use the Muster that wrote it"
            )


def newest(folder: Path) -> Path:
    """Return the bench.jsonl in an attempt's folder, or that of a run's newest attempt that has one.

    Raises:
        NotFoundError: if there is no bench.jsonl.
    """
    run = RunDir(folder)
    files = [*(run.attempt(number).bench for number in reversed(run.attempt_numbers())), folder / "bench.jsonl"]
    if file := next((each for each in files if each.is_file()), None):
        return file
    why = run.command("why")
    raise NotFoundError(f"{folder}: nothing was measured here (no attempt has a bench.jsonl); {why} shows more")


def write(path: Path, text: str) -> None:
    """Write a result by rename.

    Raises:
        RunFolderError, StorageError: if the file cannot be written.
    """
    if not path.parent.is_dir():
        raise RunFolderError(f"{path}: there is no folder {path.parent}; create it, or name another file")
    write_text(path, text)


def write_table(names: Iterable[str], rows: Iterable[Sequence[Any]], path: Path) -> None:
    """Write CSV: a line of names, then a line for each row, with empty cells for None; errors as for `write`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([list(names), *rows])
    write(path, text.getvalue())


def _json(file: Path, data: bytes, place: str) -> Any:
    try:
        return parse_json(data, most=MOST_BYTES, largest=LARGEST)
    except ValueError as error:
        raise JobFileError(
            f"{file}: {place}not JSON ({error}); the file is damaged, or not a result of Muster"
        ) from error


def _valid(file: Path, model: type[Model], data: bytes, place: str) -> Model:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise JobFileError(
            f"{file}: {place}{where}: {first['msg'].lower()}, got {first['input']!r:.60}{more}; the file is damaged"
        ) from error
