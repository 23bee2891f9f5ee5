"""Run the system's programs for a box: several at a time, with timeouts. While they run, they hold the lock of the box.

A child holds the lock as long as it runs. If `muster box up` is killed, `muster box down` gets the lock only after the
last running `ip` or `ssh-keygen` has ended, so that no program creates anything while the box is being removed.
"""

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Final

from muster.jobs.basics.errors import RefusedError

COMMAND_S: Final = 60.0
SAID: Final = 500  # characters of a program's error output in a message

Process = subprocess.Popen[str]


@dataclass(frozen=True)
class Tools:
    """The paths of programs, by name, and the descriptor of the lock that their processes hold (-1: no lock)."""

    programs: Mapping[str, str]
    lock: int = -1
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self, argv: Sequence[str], text: str = "") -> Process:
        """Start one of the programs with `text` as its input; `wait` waits for the program."""
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
        """Run one of the programs and return its output.

        Raises:
            RefusedError: if the program failed (the message has its error output), or took too long.
        """
        return wait(self.start(argv))

    def batches(self, work: Iterable[tuple[Sequence[str], Sequence[str]]]) -> None:
        """Run several batches of `ip`, `bridge` or `tc` at the same time; `work` has pairs of argv and input lines.

        Raises:
            RefusedError: if a program failed.
        """
        started = [self.start([*argv, "-batch", "-"], "\n".join(lines) + "\n") for argv, lines in work if lines]
        wait_all(started)

    @property
    def held(self) -> tuple[int, ...]:
        """The descriptors that a child process must keep open."""
        return (self.lock,) if self.lock >= 0 else ()


def wait(process: Process) -> str:
    """Wait for a program and return its output.

    Raises:
        RefusedError: if the program failed (the message has its error output), or took too long.
    """
    with process:
        try:
            out, errors = process.communicate(timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise RefusedError(f"{_shown(process.args)} did not end within {COMMAND_S:.0f} s") from None
    if process.returncode != 0:
        said = " ".join((errors or out).split())[-SAID:]
        hint = "; this may be a container without the right to create namespaces" if "not permitted" in said else ""
        raise RefusedError(f"{_shown(process.args)} failed ({process.returncode}): {said}{hint}")
    return out


def wait_all(processes: Iterable[Process]) -> None:
    """Wait for several programs; if one fails, still wait for all others.

    Raises:
        RefusedError: if a program failed; the error is that of the first program that failed.
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
    """Write a short text and close the pipe. If the program has ended early, its exit code will report that."""
    try:
        stdin.write(text)
        stdin.close()
    except BrokenPipeError:
        return


def _shown(args: object) -> str:
    return " ".join(map(str, args)) if isinstance(args, (list, tuple)) else str(args)
