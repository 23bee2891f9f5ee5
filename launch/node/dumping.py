"""Read the stacks that ranks append to their standard-error files on request."""

import asyncio
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

THREAD: Final = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):")
FRAME: Final = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


WAIT_S: Final = 2.0
QUIET_S: Final = 0.1  # a stack is written in many small pieces
POLL_S: Final = 0.02
MOST_LINES: Final = 200  # per rank
MOST_BYTES: Final = 1 << 14
READ_BYTES: Final = 1 << 18
# Frames outside this one belong to the rank parent, which forked the rank.
OUTERMOST: Final = re.compile(r'/jobs/node/rank_start\.py", line \d+ in _call$')


@dataclass
class _Log:
    path: Path
    begin: int
    size: int


class Dumps:
    """A reader of the data that ranks append to their standard error. Create it before asking for stacks."""

    def __init__(self, paths: Mapping[int, Path]) -> None:
        self._logs = {rank: _Log(path, size_of(path), size_of(path)) for rank, path in paths.items()}

    async def gather(self, ranks: Collection[int], wait_s: float = WAIT_S) -> dict[int, list[str]]:
        """Wait at most `wait_s`, until all of `ranks` have written and then paused; return the stacks of each."""
        logs = {rank: log for rank, log in self._logs.items() if rank in ranks}
        quiet_since = time.monotonic()
        deadline = quiet_since + wait_s
        while (now := time.monotonic()) < deadline:
            for log in logs.values():
                if (size := size_of(log.path)) != log.size:
                    log.size, quiet_since = size, now
            if all(log.size > log.begin for log in logs.values()) and now - quiet_since >= QUIET_S:
                break
            await asyncio.sleep(POLL_S)
        return {rank: bounded(read_from(log.path, log.begin)) for rank, log in logs.items()}


def size_of(path: Path) -> int:
    """Return the size of a file, 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_from(path: Path, offset: int) -> list[str]:
    """Return the lines of a file after an offset, or only its last READ_BYTES if there is more."""
    try:
        with path.open("rb") as file:
            file.seek(max(offset, size_of(path) - READ_BYTES))
            return file.read(READ_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []


def bounded(lines: Sequence[str], *, most_lines: int = MOST_LINES, most_bytes: int = MOST_BYTES) -> list[str]:
    """Shorten stacks that are too long. Keep the main thread, which comes last, and the innermost calls."""
    threads: list[list[str]] = []
    ours = False
    for line in lines:
        if THREAD.match(line):
            threads.append([line])
            ours = True
        elif ours and FRAME.match(line):
            threads[-1].append(line)
            ours = not OUTERMOST.search(line)
    kept: list[list[str]] = []
    for thread in reversed(threads):
        fitting = []
        for line in thread:
            most_lines -= 1
            most_bytes -= len(line.encode()) + 1
            if most_lines < 0 or most_bytes < 0:
                break
            fitting.append(line)
        if fitting:
            kept.insert(0, fitting)
        if len(fitting) < len(thread):
            break
    return [line for thread in kept for line in thread]
