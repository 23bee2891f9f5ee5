"""The pace at which a node sends copies: spread over part of the time between two copies. Pure.

    step      10    11    12    13 ... 20    21
    copy      |=== window ===|         |=== window ===|       window = SPREAD of the time between two copies
    link      .:.:.:.:.:.:.:.          .:.:.:.:.:.:.:.

The ranks then share the link and the processors with a slow sender instead of one that takes all it gets. A short
window loses fewer steps after a failure, because only a complete copy counts. The first copy is sent at full speed.
"""

import math
from typing import Final

SPREAD: Final = 0.3
LONGEST_WAIT_S: Final = 1.0  # well below the silence after which the receiver gives up
PATIENCE_S: Final = 30.0  # the sender of a copy waits at least twice as long for its end (`jobs/saving/saver.py`)
SLOWEST_BYTES_PER_S: Final = 20e6


class CopyPace:
    """The pace of one node. Times are monotonic, in seconds."""

    def __init__(self) -> None:
        self._name = ""
        self._began = 0.0
        self._nbytes = 0  # of this node's shards of the checkpoint `_name`
        self._rate = math.inf  # bytes per second
        self._free_at = 0.0  # when the next byte may be sent

    def shard(self, name: str, nbytes: int, now: float) -> None:
        """Record a new shard of this node. With the first one of a checkpoint, the pace is set for this checkpoint."""
        if name != self._name:
            if self._name:
                most = PATIENCE_S + self._nbytes / SLOWEST_BYTES_PER_S
                self._rate = self._nbytes / max(min(SPREAD * (now - self._began), most), 1e-3)
            self._name, self._began, self._nbytes = name, now, 0
        self._nbytes += nbytes

    def wait_s(self, count: int, now: float) -> float:
        """Return how long to wait before `count` bytes are sent."""
        begins = min(max(self._free_at, now), now + LONGEST_WAIT_S)
        self._free_at = begins + count / self._rate
        return begins - now
