r"""Make untrusted text safe to print: it may use colours, but cannot control the terminal.

    printable(text)    no control characters except tab and newline, and none that hide or reorder text
    shown(text)        also colours (SGR sequences), reset at the end of each line
    rank_line(text)    also carriage return and erase-line, which redraw a progress bar
    last_state(line)   the final state of such a progress bar
    cut(line)          at most the first LONGEST_SHOWN characters of it

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
LONGEST_SHOWN: Final = 1 << 16  # characters of a line on the console

_HIDDEN: Final = (
    "\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f"  # C0 except tab, newline, CR and ESC; DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional controls
    "\xad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200d\u2028\u2029\u2060-\u2065\u206a-\u206f"  # invisible
    "\u3164\ufeff\uffa0\ufff0-\ufffb\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff\ud800-\udfff"  # tags; surrogates
)
# One SGR parameter: a number (but not 8, which hides text), or 38 or 48 followed by a colour: 5;N or 2;R;G;B.
# No text matches in two ways, so that the time to match is linear.
_PARAMETER: Final = r"(?:[34]8;(?:5;\d{1,3}|2;\d{1,3};\d{1,3};\d{1,3})|0{0,2}|0?[1-79]|[125-9]\d|[34][0-79]|10\d)"
_COLOUR: Final = rf"\x1b\[{_PARAMETER}(?:;{_PARAMETER}){{0,15}}m"
_ERASE: Final = r"\x1b\[[0-2]?K"


def printable(text: str) -> str:
    """Escape every character that controls a terminal, or hides or reorders text."""
    return text if _is_plain(text) else _stretches(r"\r\x1b").sub(_escaped, text)


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


def cut(line: str) -> str:
    """Shorten a line for the console. Of a long line that redraws itself, only the last state is kept."""
    if len(line) <= LONGEST_SHOWN:
        return line
    state = line.rstrip("\r").rpartition("\r")[2]
    return state if len(state) <= LONGEST_SHOWN else f"{state[:LONGEST_SHOWN]}… ({len(state)} characters)"


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
def _stretches(more: str = "", allowed: str = "") -> re.Pattern[str]:
    """Return the pattern of text with characters to escape, and few others in between, compiled on first use.

    Whole stretches are translated at once, because output may consist of such characters. `more`: further characters to
    escape; `allowed`: the pattern of the sequences that may begin with ESC.
    """
    one = rf"(?:[{_HIDDEN}{more}]+" + (rf"|(?!{allowed})\x1b)" if allowed else ")")
    return re.compile(rf"{one}(?:[^{_HIDDEN}\r\x1b]{{0,8}}{one}){{0,100}}", re.ASCII)


def _lines(text: str, *, redrawn: bool) -> str:
    pattern = _stretches("", f"(?:{_COLOUR}|{_ERASE})") if redrawn else _stretches(r"\r", _COLOUR)
    # Lines may end in \r\n, as those from ssh do.
    lines = [line.rstrip("\r") for line in text.split("\n")] if "\r" in text else [text]
    safe = pattern.sub(_escaped, "\n".join(lines))
    return "\n".join(map(_closed, safe.split("\n"))) if "\x1b" in safe else safe


def _closed(line: str) -> str:
    """Reset the colours at the end of a line that leaves them set."""
    last = re.match(r".*(\x1b\[[\d;]*m)", line, re.ASCII | re.DOTALL)  # all sequences in it are allowed ones
    return line + RESET if last and not re.fullmatch(r"\x1b\[0*m", last[1]) else line


class _Escapes(dict[int, str]):
    """The table of str.translate: the escape of every hidden character, and all others as they are."""

    def __missing__(self, point: int) -> str:
        character = chr(point)
        self[point] = text = _escape(character) if re.match(rf"[{_HIDDEN}\r\x1b]", character) else character
        return text


_escapes = _Escapes()


def _escaped(match: re.Match[str]) -> str:
    return match[0].translate(_escapes)


def _escape(character: str) -> str:
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
