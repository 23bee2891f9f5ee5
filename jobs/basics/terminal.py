r"""Make untrusted text safe to print: it may use colours, but cannot control the terminal.

    printable(text)    no control characters except tab and newline, and none that hide or reorder text
    shown(text)        also colours (SGR sequences), reset at the end of each line
    rank_line(text)    also carriage return and erase-line, which redraw a progress bar
    last_state(line)   the final state of such a progress bar

All other control characters are escaped: \x1b, \u202e. Non-ASCII characters get JSON's escapes, so JSON stays valid.
Output to a pipe or a file is escaped too, because it often ends up in a terminal (`less -R`, `cat`).

`guard()` passes everything that is printed through `shown`. `raw(stream)` bypasses it, for Muster's own cursor
movements.
"""

import re
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any, Final, TextIO, cast

RESET: Final = "\x1b[0m"

_HIDDEN: Final = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 except tab and newline, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional controls
    "\xad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200d\u2028\u2029\u2060-\u2065\u206a-\u206f"  # invisible
    "\u3164\ufeff\uffa0\ufff0-\ufffb\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff\ud800-\udfff"  # tags; surrogates
)
# One SGR parameter: a number (but not 8, which hides text), or 38 or 48 followed by a colour: 5;N or 2;R;G;B.
_PARAMETER: Final = r"(?:[34]8;(?:5;\d{1,3}|2;\d{1,3};\d{1,3};\d{1,3})|0{0,2}|0?[1-79]|[1-9]\d|10\d)"
_COLOUR: Final = rf"\x1b\[{_PARAMETER}(?:;{_PARAMETER}){{0,15}}m"
_ERASE: Final = r"\x1b\[[0-2]?K"


def printable(text: str) -> str:
    """Escape every character that controls a terminal, or hides or reorders text."""
    return text if _is_plain(text) else _special().sub(lambda match: _escaped(match[0]), text)


def shown(text: str) -> str:
    """Escape all special characters except colours, and reset colours at the end of each line."""
    return text if _is_plain(text) else _lines(text, redrawn=False)


def rank_line(text: str) -> str:
    """Escape all special characters except colours, carriage return and erase-line."""
    return text if _is_plain(text) else _lines(text, redrawn=True)


def last_state(line: str) -> str:
    r"""Return the text that a terminal finally shows for a line: the last state of a progress bar redrawn with `\r`."""
    if _is_plain(line):
        return line
    return shown(re.sub(_ERASE, "", line.rstrip("\r").rpartition("\r")[2].replace("\0", "")))


def guard() -> None:
    """Pass everything printed on standard output and error through `shown`, until this process ends."""
    sys.stdout, sys.stderr = _guarded(sys.stdout), _guarded(sys.stderr)


def raw(stream: TextIO) -> TextIO:
    """Return the stream behind a guarded one. Text written to that stream must be Muster's own, or already escaped."""
    return stream.stream if isinstance(stream, _Guarded) else stream


class _Guarded:
    """A text stream that passes text through `shown`, and delegates everything else to the stream behind it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(shown(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _guarded(stream: TextIO) -> TextIO:
    return cast(TextIO, _Guarded(raw(stream)))


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable()  # isprintable() alone accepts some characters that hide text


@cache
def _special() -> re.Pattern[str]:
    """Return the pattern of a colour, a redraw, or one character to escape, compiled on first use."""
    return re.compile(rf"({_COLOUR})|({_ERASE}|\r)|[{_HIDDEN}]", re.ASCII)


def _lines(text: str, *, redrawn: bool) -> str:
    def replaced(match: re.Match[str]) -> str:
        return match[0] if match[1] or (match[2] and redrawn) else _escaped(match[0])

    # Lines may end in \r\n, as those from ssh do.
    lines = [line.rstrip("\r") for line in text.split("\n")] if "\r" in text else [text]
    safe = _special().sub(replaced, "\n".join(lines))
    return "\n".join(map(_closed, safe.split("\n"))) if "\x1b" in safe else safe


def _closed(line: str) -> str:
    """Reset the colours at the end of a line that leaves them set."""
    colours = re.findall(_COLOUR, line, re.ASCII)
    return line + RESET if colours and not re.fullmatch(r"\x1b\[0*m", colours[-1]) else line


def _escaped(text: str) -> str:
    return "".join(map(_escape, text))


@cache
def _escape(character: str) -> str:
    if " " <= character < "\x7f":
        return character
    if character < " ":
        return f"\\x{ord(character):02x}"
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def warn(text: str) -> None:
    """Print a warning on standard error. Ignore errors, because its file may be on the full disk that is reported."""
    with suppress(OSError):
        print(f"muster: warning: {text}", file=sys.stderr, flush=True)


def terminal_columns() -> int:
    """Return the width of the terminal behind standard output, or sys.maxsize without a terminal."""
    return shutil.get_terminal_size((sys.maxsize, 0)).columns
