"""Read files that somebody else may have written: only files of a trusted owner, and never more than a bound.

    open_file     a regular file of a trusted owner; a link as the last part of the path is not followed
    read_bytes    a whole file of at most `most` bytes
    parse_json    text to a value of bounded depth and with numbers of bounded length
    read_json     both
    json_lines    the records of a log, one at a time; a line that is too long or no JSON object is skipped

Trusted owners are this user and root. `trusting` adds another one while a command only looks at a run (`share: group`).
"""

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, Final

from jobs.errors import RunFolderError

MOST_BYTES: Final = 1 << 24
LONGEST_LINE_BYTES: Final = 1 << 22
DEEPEST: Final = 64  # levels of lists and objects
MOST_DIGITS: Final = 400  # no float needs more, and int() takes quadratic time

_TOKENS: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)
_extra_owners: ContextVar[frozenset[int]] = ContextVar("_extra_owners", default=frozenset())


class UntrustedError(RunFolderError):
    """A file or folder belongs to another user; nothing of it was used."""


@contextmanager
def trusting(*owners: int) -> Iterator[None]:
    """Also read files of these users, for commands that only show what they read; `trust` adds others meanwhile."""
    token = _extra_owners.set(frozenset(owners))
    try:
        yield
    finally:
        _extra_owners.reset(token)


def trust(owner: int) -> None:
    """Also read files of one other user, until the end of the `trusting` block."""
    _extra_owners.set(_extra_owners.get() | {owner})


def is_trusted(owner: int) -> bool:
    """Return whether files of this user id are read."""
    return owner in (os.geteuid(), 0) or owner in _extra_owners.get()


def check_owner(path: Path, status: os.stat_result) -> None:
    """Refuse a file or folder of another user.

    Raises:
        UntrustedError: if it belongs neither to this user nor to root.
    """
    if not is_trusted(status.st_uid):
        raise UntrustedError(
            f"{path}: belongs to user {status.st_uid}, expected {os.geteuid()} (you) or root; "
            "it was not used: choose another folder with --runs DIR"
        )


def open_file(path: Path, *, owned: bool = True) -> IO[bytes]:
    """Open a regular file for reading.

    Raises:
        OSError: if it cannot be opened, is a link or no regular file.
        UntrustedError: if `owned`, and it belongs to another user.
    """
    links = os.O_NOFOLLOW if owned else 0
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | links)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(22, "not a regular file", str(path))
        if owned:
            check_owner(path, status)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, most: int = MOST_BYTES, *, owned: bool = True) -> bytes:
    """Read a whole file.

    Raises:
        OSError: if it cannot be read.
        UntrustedError: if `owned`, and it belongs to another user.
        ValueError: if it has more than `most` bytes.
    """
    with open_file(path, owned=owned) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path}: has more than {most} bytes")
    return data


def parse_json(data: bytes | str, *, deepest: int = DEEPEST) -> Any:
    """Parse JSON of bounded depth.

    Raises:
        ValueError: if it is not JSON, nested deeper than `deepest`, or has a number of over 400 digits.
    """
    text = data if isinstance(data, str) else data.decode()
    if text.count("[") + text.count("{") > deepest and _is_deeper(text, deepest):
        raise ValueError(f"nested deeper than {deepest} levels")
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def read_json(path: Path, most: int = MOST_BYTES, *, owned: bool = True) -> Any:
    """Read a JSON file; errors as `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, most, owned=owned))


def json_lines(path: Path, longest: int = LONGEST_LINE_BYTES, *, owned: bool = True) -> Iterator[dict[str, Any]]:
    """Yield the records of a log line by line, whatever its size.

    An unfinished last line, a line of over `longest` bytes and a line that is no JSON object are skipped.

    Raises:
        OSError: if it cannot be read.
        UntrustedError: if `owned`, and it belongs to another user.
    """
    with open_file(path, owned=owned) as file:
        while line := file.readline(longest):
            if not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):  # the rest of a line that is too long
                    line = file.readline(longest)
                continue
            try:
                record = parse_json(line)
            except ValueError:  # torn by a full disk: the lines around it still count
                continue
            if isinstance(record, dict):
                yield record


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _is_deeper(text: str, deepest: int) -> bool:
    """Return whether lists and objects are nested deeper than so many levels; brackets within strings do not count."""
    depth = 0
    for token in _TOKENS.finditer(text):
        if token[0] in ("[", "{"):
            depth += 1
            if depth > deepest:
                return True
        elif token[0] in ("]", "}"):
            depth -= 1
    return False
