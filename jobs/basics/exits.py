"""Exit codes of Muster: one table for the command line, the supervisor, the agents and the ranks.

Codes 64-78 follow BSD's sysexits where a meaning fits. Programs should read the `class` in a verdict (`name` here)
rather than the code, which is meant for the shell.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Exit:
    """One row of the table: the exit code, its class in verdicts, and its meaning."""

    code: int
    name: str
    meaning: str


DONE: Final = 0
USAGE: Final = 2
BAD_JOB: Final = 65
NO_CHECKPOINT: Final = 66
UNREACHABLE: Final = 69
NOT_FOUND: Final = 72
RUN_FOLDER: Final = 73
STORAGE: Final = 74
REQUEUE: Final = 75
INFRASTRUCTURE: Final = 76
UNTRUSTED: Final = 77
REFUSED: Final = 78
DO_NOT_RESTART: Final = 93
TIMEOUT: Final = 124
STOPPED: Final = 130
SIGNAL_BASE: Final = 128
FAILED_CLASS: Final = "failed"

TABLE: Final[tuple[Exit, ...]] = (
    Exit(DONE, "done", "every rank ended with 0"),
    Exit(USAGE, "usage", "the command line is wrong"),
    Exit(BAD_JOB, "bad-job", "the job file is wrong"),
    Exit(NO_CHECKPOINT, "no-checkpoint", "no usable checkpoint"),
    Exit(UNREACHABLE, "unreachable", "a node cannot be reached, or its agent is gone"),
    Exit(NOT_FOUND, "not-found", "there is no such run, or it has no such record"),
    Exit(RUN_FOLDER, "run-folder", "the run folder, or a file in it, cannot be read or written"),
    Exit(STORAGE, "storage", "storage is failing or full"),
    Exit(REQUEUE, "requeue", "stopped after saving a checkpoint; queue the job again"),
    Exit(INFRASTRUCTURE, "infrastructure", "the infrastructure failed, so a restart may help (agent to supervisor)"),
    Exit(UNTRUSTED, "untrusted", "a file or folder belongs to another user, or others may write in it"),
    Exit(REFUSED, "refused", "the configuration is refused"),
    Exit(DO_NOT_RESTART, "do-not-restart", "restarting cannot help"),
    Exit(TIMEOUT, "timeout", "a deadline passed"),
    Exit(STOPPED, "stopped", "stopped by the user"),
)


def class_of(code: int) -> str:
    """Return the class of an exit code: its name in the table, `signal` for 128+n, else `failed`."""
    for row in TABLE:
        if row.code == code:
            return row.name
    return "signal" if SIGNAL_BASE < code < SIGNAL_BASE + 65 else FAILED_CLASS


def of_system_exit(status: object) -> tuple[int, str]:
    """Return the exit code of a program that `SystemExit(status)` ends, and the text that Python prints for it."""
    if status is None or isinstance(status, int):
        return (status or 0) & 0xFF, ""
    return 1, str(status)
