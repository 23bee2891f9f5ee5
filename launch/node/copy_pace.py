"""The pace at which a node sends its copies: steady, over a part of the time between two copies.

    step      10         11         12         13     …    20         21
    copies    .:.:.:.:.:.:.:.:.:.:.:                       .:.:.:.:.:      : a chunk, then a pause
              |---- SPREAD of the time until step 20 ---->|

Only a complete copy helps after a failure, so the pace leaves most of that time as a reserve. At full speed, messages
of the ranks would wait behind the copy. The time and the bytes are those of the copy before, so the first one has no
pauses.
"""

from typing import Final

SPREAD: Final = 0.25
LONGEST_S: Final = 30.0  # of sending; a rank waits at least twice as long for the end (`jobs/saving/saver.py`)
LONGEST_PAUSE_S: Final = 1.0  # well below the silence after which the receiver gives up


class CopyPace:
    """The pace of the copies of one node. Pure; times are monotonic, in seconds."""

    def __init__(self) -> None:
        self._name = ""
        self._began = 0.0
        self._bytes = 0
        self._seconds_per_byte = 0.0

    def shard(self, name: str, size: int, now: float) -> None:
        """Record a new shard of this node. The first one of a checkpoint sets the pace."""
        if name != self._name:
            if self._name:
                self._seconds_per_byte = min(SPREAD * (now - self._began), LONGEST_S) / max(self._bytes, 1)
            self._name, self._began, self._bytes = name, now, 0
        self._bytes += size

    def pause_s(self, count: int) -> float:
        """Return how long to pause before sending `count` bytes."""
        return min(count * self._seconds_per_byte, LONGEST_PAUSE_S)
