"""A page of memory that a rank shares with its keeper: how far it is, and what it is asked; no message, no wait.

    the rank writes      phase, steps, beats, slowest_us, held     beats: any progress whatever
    the keeper writes    hold, stop_at

The keeper makes one per rank before the fork (anonymous shared memory: no name, no descriptor, nothing to clean up).
Every field is 8 bytes at its own place, has one writer, and is written and read at once: nobody sees half of a number.
A rank without a keeper has a page of its own: nobody asks.
"""

import mmap
from enum import IntEnum
from typing import Final

SIZE: Final = mmap.PAGESIZE
NEVER: Final = -1
_PHASE, _STEPS, _BEATS, _SLOWEST_US, _HELD, _HOLD, _STOP_AT = range(7)


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
    """One rank's page, seen from either side."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, SIZE)
        # Native numbers, aligned: struct's standard ones are written byte by byte, so that -1 could become 5 by way
        # of -251, which is a number of steps to a rank that looks just then.
        self._fields = memoryview(self._memory).cast("q")
        for field in (_HELD, _STOP_AT):
            self._set(field, NEVER)

    def close(self) -> None:
        """Give the memory back: on this side alone."""
        self._fields.release()
        self._memory.close()

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
        return Phase(self._get(_PHASE))

    @property
    def steps(self) -> int:
        """Steps that are done."""
        return self._get(_STEPS)

    @property
    def beats(self) -> int:
        """A number that grows with every progress."""
        return self._get(_BEATS)

    @property
    def slowest_s(self) -> float:
        """The slowest step of late, in seconds."""
        return self._get(_SLOWEST_US) / 1e6

    @property
    def held(self) -> int:
        """Steps done by a rank that waits; `NEVER` while it does not."""
        return self._get(_HELD)

    def _get(self, field: int) -> int:
        return self._fields[field]

    def _set(self, field: int, value: int) -> None:
        self._fields[field] = value


own = Page()  # of this process; a keeper puts the shared one in its place, in the child it has forked for a rank
