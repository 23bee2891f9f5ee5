"""The system's programs, as a box calls them: many at a time, with deadlines, and holding the lock of the box.

A child keeps the lock open as long as it runs. When `muster box up` is killed, `muster box down` gets the lock only
when the last `ip` or `ssh-keygen` that was under way has ended, so that nothing is made behind its back.
"""

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Final

from muster.jobs.basics.errors import RefusedError

COMMAND_S: Final = 60.0
SAID: Final = 500  # characters of a program's complaint that a message repeats

Process = subprocess.Popen[str]


@dataclass(frozen=True)
class Tools:
    """Programs by name, and the descriptor of the lock that their processes hold; -1: none."""

    programs: Mapping[str, str]
    lock: int = -1
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self, argv: Sequence[str], text: str = "") -> Process:
        """Start a program of the table with a text as its input; `wait` waits for it."""
        process = subprocess.Popen(
            [self.programs[argv[0]], *argv[1:]],
            stdin=subprocess.PIPE if text else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "LC_ALL": "C", **self.environment},
            pass_fds=self.held,
        )
        if process.stdin is not None:
            _feed(process.stdin, text)
            process.stdin = None
        return process

    def run(self, argv: Sequence[str]) -> str:
        """Run a program of the table and return what it printed.

        Raises:
            RefusedError: it failed, with its own words; or took too long.
        """
        return wait(self.start(argv))

    def batches(self, work: Iterable[tuple[Sequence[str], Sequence[str]]]) -> None:
        """Give lines to `ip` or `tc`, to all at the same time: pairs of argv and lines.

        Raises:
            RefusedError: one failed.
        """
        started = [self.start([*argv, "-batch", "-"], "\n".join(lines) + "\n") for argv, lines in work if lines]
        wait_all(started)

    @property
    def held(self) -> tuple[int, ...]:
        """What a child of ours is to keep open."""
        return (self.lock,) if self.lock >= 0 else ()


def wait(process: Process) -> str:
    """Wait for a program and return what it printed.

    Raises:
        RefusedError: it failed, with its own words; or took too long.
    """
    with process:
        try:
            out, errors = process.communicate(timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise RefusedError(f"{_shown(process.args)}: not done after {COMMAND_S:.0f} s") from None
    if process.returncode != 0:
        said = " ".join((errors or out).split())[-SAID:]
        hint = "; is this a container without the right to make namespaces?" if "not permitted" in said else ""
        raise RefusedError(f"{_shown(process.args)} failed ({process.returncode}): {said}{hint}")
    return out


def wait_all(processes: Iterable[Process]) -> None:
    """Wait for several programs, for all of them also when one fails.

    Raises:
        RefusedError: one failed; the first of them.
    """
    failures = []
    for process in processes:
        try:
            wait(process)
        except RefusedError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _feed(stdin: IO[str], text: str) -> None:
    """Write all of a short text, so that all programs work at once; one that ended early tells why by its code."""
    try:
        stdin.write(text)
        stdin.close()
    except BrokenPipeError:
        return


def _shown(args: object) -> str:
    return " ".join(map(str, args)) if isinstance(args, (list, tuple)) else str(args)
