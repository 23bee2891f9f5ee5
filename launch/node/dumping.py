"""The stacks that ranks write to their standard error when they are asked for them: found behind what was there."""

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
QUIET_S: Final = 0.1  # a stack comes in many small writes
POLL_S: Final = 0.02
MOST_LINES: Final = 200  # of one rank
MOST_BYTES: Final = 1 << 14
READ_BYTES: Final = 1 << 18
# Below it is the keeper that forked the rank.
OUTERMOST: Final = re.compile(r'/jobs/node/rank_start\.py", line \d+ in _call$')


@dataclass
class _Log:
    path: Path
    begin: int
    size: int


class Dumps:
    """The standard errors of some ranks, from now on. Make it before the ranks are asked."""

    def __init__(self, paths: Mapping[int, Path]) -> None:
        self._logs = {rank: _Log(path, size_of(path), size_of(path)) for rank, path in paths.items()}

    async def gather(self, ranks: Collection[int], wait_s: float = WAIT_S) -> dict[int, list[str]]:
        """Wait until each of `ranks` has written and all are quiet, or the time is over; return what each wrote."""
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
    """Return the size of a file; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_from(path: Path, offset: int) -> list[str]:
    """Return the lines of a file from an offset on; where that is very much, the last part of it."""
    try:
        with path.open("rb") as file:
            file.seek(max(offset, size_of(path) - READ_BYTES))
            return file.read(READ_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []


def bounded(lines: Sequence[str], *, most_lines: int = MOST_LINES, most_bytes: int = MOST_BYTES) -> list[str]:
    """Keep what matters of stacks that are too long: the main thread, which comes last, and the innermost calls."""
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
