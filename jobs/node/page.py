"""A page of memory that a rank shares with its parent process: progress in one direction, requests in the other.

    the rank writes            phase, steps, beats, slowest_us, held     beats: any progress at all
                               session, deaf, dumps                      a program that has opened a session
    the rank parent writes     hold, stop_at, regroups

The rank parent creates one page per rank before the fork. The page is anonymous shared memory for a rank that runs
Muster's code, and a memfd for a program, which inherits the descriptor across exec (`Page.attach`, MUSTER_PAGE in
jobs/hosts/ranks.py). Every field is an aligned 8-byte number with one writer, read and written atomically. Values are
bounded when read, because a program can write anything into its page. A process without a rank parent has a page that
no other process reads.
"""

import mmap
import os
from contextlib import suppress
from enum import IntEnum
from typing import Final

from muster.jobs.machine import linux

SIZE: Final = mmap.PAGESIZE
NEVER: Final = -1
MOST: Final = (1 << 53) - 1  # larger counts are invalid
ANY: Final = (1 << 63) - 1
MOST_PID: Final = 1 << 22  # the kernel's own limit


class Phase(IntEnum):
    """The activity of a rank. Each phase has its own time limit without progress (launch/supervision/progress.py)."""

    START = 0
    LOAD = 1
    RUN = 2
    SAVE = 3
    EVALUATE = 4
    END = 5

    @property
    def word(self) -> str:
        """The name of the phase in messages and events."""
        return self.name.lower()


class _Field:
    """A number at a fixed position in the page, bounded when read because a user's program may have written it."""

    def __init__(self, place: int, least: int = 0, most: int = MOST) -> None:
        self.place, self.least, self.most = place, least, most

    def __get__(self, page: "Page", kind: type | None = None) -> int:
        return max(self.least, min(page._fields[self.place], self.most))

    def __set__(self, page: "Page", value: int) -> None:
        page._fields[self.place] = value


class Page:
    """The page of one rank, used on both sides. `descriptor` is its memfd, or -1 for anonymous memory."""

    _phase = _Field(0)
    steps = _Field(1)  # number of completed steps
    beats = _Field(2)  # a counter that grows with any progress
    _slowest_us = _Field(3)  # duration of the longest recent step
    held = _Field(4, NEVER)  # number of completed steps while the rank waits before its next step; else NEVER
    hold = _Field(5)  # nonzero: the rank must wait, before its next step, until `stop_at` is set
    stop_at = _Field(6, NEVER, ANY)  # the number of steps after which all ranks save and end; NEVER: not decided
    _session = _Field(7, NEVER)
    deaf = _Field(8)  # nonzero: the rank ignores SIGTERM; SIGINT asks it to end
    dumps = _Field(9)  # nonzero: SIGQUIT makes the session's process write its stacks
    regroups = _Field(10)  # nonzero: after `stop_at` steps the rank waits for an order (`orders.py`), and does not end

    def __init__(self, descriptor: int = -1) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, SIZE)
        # Native aligned numbers are written in one piece. struct's standard formats are written byte by byte: while -1
        # changes to 5, the other side could read -251.
        self._fields = memoryview(self._memory).cast("q")
        if descriptor < 0:
            self._clear()

    @classmethod
    def inheritable(cls) -> "Page":
        """Create a page that a program can attach to after exec. Its size cannot change."""
        made = cls(linux.memory_file("muster-page", SIZE))
        made._clear()
        return made

    @classmethod
    def attach(cls, descriptor: int) -> "Page":
        """Map the page that this program inherited. Programs that this one starts do not inherit the page.

        Raises:
            ValueError, OSError: if the descriptor is not a page.
        """
        os.set_inheritable(descriptor, False)
        return cls(descriptor)

    def close_descriptor(self) -> None:
        """Close this process's descriptor. The page stays mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Unmap the page in this process."""
        self.close_descriptor()
        self._fields.release()
        self._memory.close()

    def _clear(self) -> None:
        self.held = self.stop_at = NEVER

    # The rank's side ------------------------------------------------------------------------------------------------

    def enter(self, phase: Phase) -> None:
        """Record the start of a phase."""
        self._phase = phase
        self.beat()

    def beat(self) -> None:
        """Record progress of any kind."""
        self.beats += 1

    def step_done(self, steps: int, slowest_s: float) -> None:
        """Record the end of a step: the `steps` done in the job so far, and the duration of the slowest recent step."""
        self.steps, self._slowest_us = steps, int(slowest_s * 1e6)
        self.beat()

    def open_session(self, pid: int, *, deaf: bool = False, dumps: bool = False) -> None:
        """Record that a program uses a session in process `pid`.

        `deaf`: the program ignores SIGTERM, and SIGINT asks it to end. `dumps`: SIGQUIT makes it write its stacks.
        """
        self.deaf, self.dumps, self._session = int(deaf), int(dumps), pid

    # The rank parent's side -----------------------------------------------------------------------------------------

    def stop(self, steps: int, *, regroups: bool) -> None:
        """Make the rank stop after `steps` steps: to save and end, or to wait for an order."""
        self.regroups = int(regroups)
        self.stop_at = steps  # last, because the rank waits for it

    def renew(self, steps: int | None) -> None:
        """Forget the requests to the rank, which continues. `steps`: those of the checkpoint that it loads, if any."""
        self.hold, self.regroups, self.stop_at = 0, 0, NEVER
        if steps is not None:
            self.steps = steps

    @property
    def phase(self) -> Phase:
        """The current phase of the rank."""
        with suppress(ValueError):  # a program may write anything into the page
            return Phase(self._phase)
        return Phase.START

    @property
    def session(self) -> int:
        """The pid of the program that has opened a session; 0 if none has."""
        return self._session if 0 < self._session <= MOST_PID else 0

    @property
    def slowest_s(self) -> float:
        """The duration of the slowest recent step, in seconds."""
        return self._slowest_us / 1e6


own = Page()  # the page of this process; in a forked rank, the rank parent replaces it with the shared page
