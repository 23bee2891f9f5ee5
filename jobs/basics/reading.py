"""Read untrusted files safely: only files of a trusted owner, and never more than a limit.

    open_file     open a regular file of a trusted owner; a link as the last part of the path is not followed
    target_of     return the target of a link of a trusted owner
    read_bytes    read a whole file of at most `most` bytes
    read_rest     read the rest of an open file
    read_end      read the last bytes of a file of any size
    parse_json    parse text to a value of limited depth and size, with numbers of limited length
    read_json     read_bytes, then parse_json
    Lines         split the bytes of a pipe or a socket into lines

Trusted owners are this user and root. Commands that only show a run add other owners with `trusting` (`share: group`).
`owned=False` is for files named on the command line, which may have any owner and may be links or pipes.
"""

import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, Final

from muster.jobs.basics import exits
from muster.jobs.basics.errors import RunFolderError

MOST_BYTES: Final = 1 << 24  # enough for a record of 100,000 ranks
SETTINGS_BYTES: Final = 1 << 20  # for handwritten job, site and hosts files; YAML takes a second per megabyte
LONGEST_LINE_BYTES: Final = 1 << 22
DEEPEST: Final = 64  # maximum number of nested levels of lists and objects
MOST_VALUES: Final = 1 << 20  # maximum number of values; each takes up to 100 bytes of memory once parsed
MOST_DIGITS: Final = 400  # enough for any float; the time of int() is quadratic in the digits
CHUNK_BYTES: Final = 1 << 20

LATEST_S: Final = 253_402_300_799  # 9999-12-31, the last day that `datetime` supports
LARGEST: Final = 1e60  # limit for measurements, so that a sum of squares stays finite
_STRINGS: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_BRACKETS: Final = re.compile(r"[\[\]{}]")
_STEPS: Final = {"[": 1, "{": 1, "]": -1, "}": -1}
_extra_owners: ContextVar[frozenset[int]] = ContextVar("_extra_owners", default=frozenset())


class UntrustedError(RunFolderError):
    """A file or folder belongs to another user and was not used."""

    exit_code = exits.UNTRUSTED


@contextmanager
def trusting(*owners: int) -> Iterator[None]:
    """Also trust files of these users within the block, for read-only commands; `trust` adds more users."""
    token = _extra_owners.set(frozenset(owners))
    try:
        yield
    finally:
        _extra_owners.reset(token)


def trust(owner: int) -> None:
    """Also trust files of another user, until the end of the `trusting` block."""
    _extra_owners.set(_extra_owners.get() | {owner})


def is_trusted(owner: int) -> bool:
    """Return True if files of this user id may be read."""
    return owner in (os.geteuid(), 0) or owner in _extra_owners.get()


def check_owner(path: Path, status: os.stat_result) -> None:
    """Refuse a file or folder of another user.

    Raises:
        UntrustedError: if the owner is not trusted.
    """
    if not is_trusted(status.st_uid):
        raise UntrustedError(
            f"{path}: belongs to user {status.st_uid}, expected {os.geteuid()} (you) or root; "
            "it was not used; choose another folder with --runs DIR"
        )


def open_file(path: Path, *, owned: bool = True) -> IO[bytes]:
    """Open a file for reading.

    Raises:
        OSError: if the file cannot be opened.
        UntrustedError: if `owned`, and the file belongs to another user, is a link or is not a regular file.
    """
    if not owned:
        return path.open("rb")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UntrustedError(f"{path}: is a link, expected a file; it was not used; remove it") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedError(f"{path}: is not a regular file; it was not used; remove it")
        check_owner(path, status)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def target_of(path: Path) -> Path:
    """Return the target of a link, or `path` itself if it is not a link.

    Raises:
        UntrustedError: if the link belongs to another user.
    """
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return path
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISLNK(status.st_mode):
            return path
        check_owner(path, status)
        return path.parent / os.readlink("", dir_fd=descriptor)
    finally:
        os.close(descriptor)


def read_bytes(path: Path, most: int = MOST_BYTES, *, owned: bool = True) -> bytes:
    """Read a whole file.

    Raises:
        OSError, UntrustedError: as for `open_file`.
        ValueError: if the file has more than `most` bytes.
    """
    with open_file(path, owned=owned) as file:
        try:
            return read_rest(file.read, most)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def read_rest(read: Callable[[int], bytes], most: int) -> bytes:
    """Read the rest of an open file or stream.

    Raises:
        ValueError: if the rest has more than `most` bytes.
    """
    data = bytearray()
    while piece := read(min(CHUNK_BYTES, most + 1 - len(data))):
        data += piece
    if len(data) > most:
        raise ValueError(f"has more than {most} bytes")
    return bytes(data)


def read_end(path: Path, most: int, *, owned: bool = True) -> bytes:
    """Read at most the last `most` bytes of a file; errors as for `open_file`."""
    with open_file(path, owned=owned) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read(most)


def parse_json(data: bytes | str, *, most: int = MOST_VALUES, largest: float = math.inf) -> Any:
    """Parse JSON of limited depth and size.

    Raises:
        ValueError: if the text is not JSON, is nested deeper than `DEEPEST`, has more than `most` values, or has a
            number of more than 400 digits or beyond `largest`.
    """
    text = data if isinstance(data, str) else data.decode()
    brackets = text.count("[") + text.count("{")
    if brackets + text.count(",") > most and sum(map(_STRINGS.sub("", text).count, "[{,")) > most:
        raise ValueError(f"more than {most} values")
    if brackets > DEEPEST and _is_deeper(text):
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    if largest < math.inf or _has_long_number(text):
        return json.loads(text, parse_int=partial(_number, int, largest), parse_float=partial(_number, float, largest))
    return json.loads(text)


def read_json(path: Path, most: int = MOST_BYTES, *, owned: bool = True) -> Any:
    """Read a JSON file; errors as for `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, most, owned=owned))


class Lines:
    """A line splitter for a byte stream. It keeps at most `longest` bytes of an unfinished line."""

    def __init__(self, longest: int | None = None) -> None:
        self._longest = longest
        self._held = b""

    def of(self, data: bytes) -> list[bytes]:
        """Add bytes; return the lines that they complete, without newlines."""
        *whole, rest = (self._held + data).split(b"\n")
        self._held = rest[: self._longest]
        return whole


def _number(kind: type[int] | type[float], largest: float, digits: str) -> int | float:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits is too long")
    if not -largest <= (value := kind(digits)) <= largest:
        raise ValueError(f"{digits:.20} is beyond {largest:g}")
    return value


def _has_long_number(text: str) -> bool:
    """Return True if a number may exceed MOST_DIGITS digits: one of the blocks of half that length has only digits."""
    block = MOST_DIGITS // 2
    return len(text) > MOST_DIGITS and any(
        text[begin : begin + block].isdigit() for begin in range(0, len(text), block)
    )


def _is_deeper(text: str) -> bool:
    """Return True if lists and objects are nested deeper than `DEEPEST` levels; brackets in strings do not count."""
    steps = map(_STEPS.__getitem__, _BRACKETS.findall(_STRINGS.sub("", text)))
    return any(depth > DEEPEST for depth in accumulate(steps))
