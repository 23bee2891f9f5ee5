"""Commands on a terminal of their own, and what must never arrive there."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 60.0

COLOUR = re.compile(r"\x1b\[([0-9;]*)m")
FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)
ATTACKS = {
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;cm0gLXJm\x1b\\",
    "link": "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "device control": "\x1bP+q544e\x1b\\",
    "window size": "\x1b[8;1;1t",
    "cursor": "\x1b[3A\x1b[2J\x1b[H",
    "report": "\x1b[6n\x1b[c\x05",
    "hidden": "\x1b[8mhidden\x1b[0m \x1b[1;8;31mhidden\x1b[0m",
    "eight bits": "\x9b8;1;1t\x9d0;owned\x9c",
    "bidi": "\u202eevil\u202c \u2066x\u2069 \u200f\u061c",
    "invisible": "a\u200bb\u2060c\ufeff\U000e0041\U000e0042",
    "mode": "\x1b[?1049h\x1b[?25l\x1bc\x0e",
    "backspace": "safe\x08\x08\x08\x08evil\x7f\x0b\x0c",
}
HOSTILE = " ".join(ATTACKS.values())


def forbidden_in(text: str) -> list[str]:
    """Return what a terminal would obey or hide in a text, apart from colours and the ends of its lines."""
    hiding = [match[0] for match in COLOUR.finditer(text) if "8" in plain_parameters(match[1])]
    return hiding + FORBIDDEN.findall(COLOUR.sub("", text).replace("\r\n", "\n"))


def plain_parameters(parameters: str) -> list[str]:
    """Return the parameters of a colour without those that say which colour."""
    return [each.lstrip("0") for each in re.sub(r"\b[34]8;(5;\d+|2;\d+;\d+;\d+)", "", parameters).split(";")]


def environment() -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if name != "NO_COLOR"},
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)]),
        "PYTHONUTF8": "1",
        "TERM": "xterm-256color",
        "COLUMNS": "200",
    }


def muster_argv(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "muster", *arguments]


def on_terminal(*arguments: str) -> tuple[int, str]:
    """Call `muster ...` with its three streams on a terminal; return the code and what the terminal was sent."""
    leader, follower = pty.openpty()
    try:
        process = subprocess.Popen(
            muster_argv(*arguments), stdin=follower, stdout=follower, stderr=follower, env=environment()
        )
    finally:
        os.close(follower)
    sent = b"".join(_all_of(leader))
    os.close(leader)
    return process.wait(timeout=DEADLINE_S), sent.decode()


def through_pipes(*arguments: str) -> tuple[int, str, str]:
    """Call `muster ...` with its output in pipes; return the code, standard output and standard error."""
    done = subprocess.run(
        muster_argv(*arguments), env=environment(), capture_output=True, timeout=DEADLINE_S, check=False
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def _all_of(leader: int) -> Iterator[bytes]:
    while True:
        try:
            data = os.read(leader, 1 << 16)
        except OSError:  # Linux: the last process that had the terminal open has closed it
            return
        if not data:
            return
        yield data
