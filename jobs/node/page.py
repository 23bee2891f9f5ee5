"""A page of memory that a rank shares with its keeper: how far it is, and what it is asked; no message, no wait.

    the rank writes      phase, steps, beats, slowest_us, held     beats: any progress whatever
                         session, deaf, dumps                      a program that has opened a session
    the keeper writes    hold, stop_at

The keeper makes one per rank before the fork: anonymous shared memory for a rank of ours, a memfd for a program, which
inherits its descriptor across exec (`Page.attach`, MUSTER_PAGE in jobs/hosts/ranks.py).
Every field is 8 bytes at its own place, has one writer, and is written and read at once: nobody sees half of a number.
The keeper bounds what it reads, because a program can write anything into its page.
A rank without a keeper has a page of its own: nobody asks.
"""

import mmap
import os
from contextlib import suppress
from enum import IntEnum
from typing import Final

from muster.jobs.machine import linux

SIZE: Final = mmap.PAGESIZE
NEVER: Final = -1
MOST: Final = (1 << 53) - 1  # no count of an honest rank is larger
ANY: Final = (1 << 63) - 1
MOST_PID: Final = 1 << 22  # the kernel's own limit


class Phase(IntEnum):
    """What a rank is busy with; each has its own limit of silence (launch/supervision/progress.py)."""

    START = 0
    LOAD = 1
    RUN = 2
    SAVE = 3
    EVALUATE = 4
    END = 5

    @property
    def word(self) -> str:
        """The phase in a message or an event."""
        return self.name.lower()


class _Field:
    """A number at its place. One that a rank writes, which may be a program of the user's, is bounded when read."""

    def __init__(self, place: int, least: int = 0, most: int = MOST) -> None:
        self.place, self.least, self.most = place, least, most

    def __get__(self, page: "Page", kind: type | None = None) -> int:
        return max(self.least, min(page._fields[self.place], self.most))

    def __set__(self, page: "Page", value: int) -> None:
        page._fields[self.place] = value


class Page:
    """One rank's page, seen from either side. `descriptor`: of the memfd that holds it; -1: anonymous memory."""

    _phase = _Field(0)
    steps = _Field(1)  # that are done
    beats = _Field(2)  # grows with every progress
    _slowest_us = _Field(3)  # of the steps of late
    held = _Field(4, NEVER)  # steps done by a rank that waits between two of them; NEVER: it goes on
    hold = _Field(5)  # not 0: the rank should wait before its next step until it is told after which step to stop
    stop_at = _Field(6, NEVER, ANY)  # the number of steps after which all ranks save and end; NEVER: nobody has said
    _session = _Field(7, NEVER)
    deaf = _Field(8)  # not 0: the rank ignores SIGTERM, and is asked to end by SIGINT
    dumps = _Field(9)  # not 0: SIGQUIT makes the session's process write its stacks

    def __init__(self, descriptor: int = -1) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, SIZE)
        # Native numbers, aligned: struct's standard ones are written byte by byte, so that -1 could become 5 by way
        # of -251, which is a number of steps to a rank that looks just then.
        self._fields = memoryview(self._memory).cast("q")
        if descriptor < 0:
            self._clear()

    @classmethod
    def inheritable(cls) -> "Page":
        """Make a page that a program can attach after exec; nobody can change its size."""
        made = cls(linux.memory_file("muster-page", SIZE))
        made._clear()
        return made

    @classmethod
    def attach(cls, descriptor: int) -> "Page":
        """Map the page that this program has inherited; the programs that it starts do not inherit it.

        Raises:
            ValueError, OSError: the descriptor is no page.
        """
        os.set_inheritable(descriptor, False)
        return cls(descriptor)

    def close_descriptor(self) -> None:
        """Close this process's descriptor. The page stays mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Give the memory back: on this side alone."""
        self.close_descriptor()
        self._fields.release()
        self._memory.close()

    def _clear(self) -> None:
        self.held = self.stop_at = NEVER

    # The rank's side ------------------------------------------------------------------------------------------------

    def enter(self, phase: Phase) -> None:
        """Begin a phase."""
        self._phase = phase
        self.beat()

    def beat(self) -> None:
        """Make progress of any kind."""
        self.beats += 1

    def step_done(self, steps: int, slowest_s: float) -> None:
        """End a step: `steps` are done since the job's beginning, `slowest_s` is the slowest of late."""
        self.steps, self._slowest_us = steps, int(slowest_s * 1e6)
        self.beat()

    def open_session(self, pid: int, *, deaf: bool = False, dumps: bool = False) -> None:
        """Say that a program uses the session, in process `pid`.

        `deaf`: it ignores SIGTERM, and is asked to end by SIGINT. `dumps`: SIGQUIT makes it write its stacks.
        """
        self.deaf, self.dumps, self._session = int(deaf), int(dumps), pid

    # The keeper's side ----------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """What the rank is busy with."""
        with suppress(ValueError):  # a program may have written anything
            return Phase(self._phase)
        return Phase.START

    @property
    def session(self) -> int:
        """The process of a program that has opened a session; 0: none has."""
        return self._session if 0 < self._session <= MOST_PID else 0

    @property
    def slowest_s(self) -> float:
        """The slowest step of late, in seconds."""
        return self._slowest_us / 1e6


own = Page()  # of this process; a keeper puts the shared one in its place, in the child it has forked for a rank
