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
MOST_PID: Final = 1 << 22  # the kernel's own limit
_PHASE, _STEPS, _BEATS, _SLOWEST_US, _HELD, _HOLD, _STOP_AT, _SESSION, _DEAF, _DUMPS = range(10)


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


class Page:
    """One rank's page, seen from either side. `descriptor`: of the memfd that holds it; -1: anonymous memory."""

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
        for field in (_HELD, _STOP_AT):
            self._set(field, NEVER)

    # The rank's side ------------------------------------------------------------------------------------------------

    def enter(self, phase: Phase) -> None:
        """Begin a phase."""
        self._set(_PHASE, phase)
        self.beat()

    def beat(self) -> None:
        """Make progress of any kind."""
        self._set(_BEATS, self._get(_BEATS) + 1)

    def step_done(self, steps: int, slowest_s: float) -> None:
        """End a step: `steps` are done since the job's beginning, `slowest_s` is the slowest of late."""
        self._set(_STEPS, steps)
        self._set(_SLOWEST_US, int(slowest_s * 1e6))
        self.beat()

    def hold_at(self, steps: int) -> None:
        """Say that this rank waits between two steps, `steps` done; `NEVER`: it goes on."""
        self._set(_HELD, steps)

    def open_session(self, pid: int, *, deaf: bool = False, dumps: bool = False) -> None:
        """Say that a program uses the session, in process `pid`.

        `deaf`: it ignores SIGTERM, and is asked to end by SIGINT. `dumps`: SIGQUIT makes it write its stacks.
        """
        self._set(_DEAF, int(deaf))
        self._set(_DUMPS, int(dumps))
        self._set(_SESSION, pid)

    @property
    def is_asked_to_hold(self) -> bool:
        """True when the rank should wait before its next step until it is told after which step to stop."""
        return self._get(_HOLD) != 0

    @property
    def stop_at(self) -> int:
        """The number of steps after which all ranks save and end; `NEVER`: nobody has said."""
        return self._get(_STOP_AT)

    # The keeper's side ----------------------------------------------------------------------------------------------

    def ask_to_hold(self) -> None:
        """Ask the rank to wait before its next step."""
        self._set(_HOLD, 1)

    def set_stop_at(self, steps: int) -> None:
        """Tell the rank after how many steps to save and end."""
        self._set(_STOP_AT, steps)

    @property
    def phase(self) -> Phase:
        """What the rank is busy with."""
        with suppress(ValueError):  # a program may have written anything
            return Phase(self._get(_PHASE))
        return Phase.START

    @property
    def session(self) -> int:
        """The process of a program that has opened a session; 0: none has."""
        pid = self._get(_SESSION)
        return pid if 0 < pid <= MOST_PID else 0

    @property
    def is_deaf(self) -> bool:
        """True when the rank ignores SIGTERM."""
        return self._get(_DEAF) != 0

    @property
    def dumps(self) -> bool:
        """True when SIGQUIT makes the session's process write its stacks."""
        return self._get(_DUMPS) != 0

    @property
    def steps(self) -> int:
        """Steps that are done."""
        return self._count(_STEPS)

    @property
    def beats(self) -> int:
        """A number that grows with every progress."""
        return self._get(_BEATS)

    @property
    def slowest_s(self) -> float:
        """The slowest step of late, in seconds."""
        return self._count(_SLOWEST_US) / 1e6

    @property
    def held(self) -> int:
        """Steps done by a rank that waits; `NEVER` while it does not."""
        return max(NEVER, min(self._get(_HELD), MOST))

    def _count(self, field: int) -> int:
        return max(0, min(self._get(field), MOST))

    def _get(self, field: int) -> int:
        return self._fields[field]

    def _set(self, field: int, value: int) -> None:
        self._fields[field] = value


own = Page()  # of this process; a keeper puts the shared one in its place, in the child it has forked for a rank
