"""When a node sends copies: while the ranks do not use the network, as long as there is time.

    step      10         11         12         13     …    20         21
    ranks     ##  ###  # ##  ###  # ##  ###  # ##          ##  ###  # ##         # messages of the ranks
    copies    |.::...::|...::...::|...::...::|             |.::...::|            : sent
              |-------- window ------->| then at full speed

The ranks of all nodes wait for each other in collectives. A slow but steady sender delays them on every link in turn,
and so costs them more time than a short one. The window is SPREAD of the time between two copies, because only a
complete copy helps after a failure. Nothing is known before the second copy, so the first is sent at full speed.
"""

from pathlib import Path
from typing import Final

SPREAD: Final = 0.25
LONGEST_WAIT_S: Final = 1.0  # well below the silence after which the receiver gives up
LONGEST_S: Final = 30.0  # of the window; a rank waits at least twice as long for the end (`jobs/saving/saver.py`)
QUIET_BYTES_PER_S: Final = 5e6  # less is sent while the ranks compute, such as heartbeats and acknowledgements
SOME_BYTES: Final = 1 << 14  # a few messages
HEADERS: Final = 1.1  # bytes on the link for a byte of a copy, at most
DEVICES: Final = "/proc/net/dev"
SENT: Final = 8  # the column with the number of bytes sent


class CopyPace:
    """The time that one node has for its copies. Pure; times are monotonic, in seconds."""

    def __init__(self) -> None:
        self._name = ""
        self._began = 0.0
        self._until = 0.0

    def shard(self, name: str, now: float) -> None:
        """Record a new shard of this node. The first one of a checkpoint opens the window."""
        if name != self._name:
            self._until = now + (min(SPREAD * (now - self._began), LONGEST_S) if self._name else 0.0)
            self._name, self._began = name, now

    def may_wait(self, since: float, now: float) -> bool:
        """Return whether a sender that has waited since then may wait longer."""
        return now < min(self._until, since + LONGEST_WAIT_S)


class OtherTraffic:
    """The bytes that other programs of this host send. Each process sees the devices of its network namespace."""

    def __init__(self) -> None:
        self._own = 0.0  # bytes of copies that the devices have not sent yet
        self._total, self._at = self._sent(), 0.0

    def sending(self, count: int) -> None:
        """Record that this process is about to send `count` bytes, which are not other traffic."""
        self._own += HEADERS * count

    def is_quiet(self, now: float) -> bool:
        """Return whether others have sent hardly anything since the last call."""
        total = self._sent()
        sent, elapsed_s = total - self._total, now - self._at
        own = min(float(sent), self._own)
        self._own, self._total, self._at = self._own - own, total, now
        return sent - own <= SOME_BYTES + QUIET_BYTES_PER_S * elapsed_s

    def _sent(self) -> int:
        with Path(DEVICES).open("rb", buffering=0) as file:
            named = (line.partition(b":") for line in file.readall().splitlines())
            return sum(int(counts.split()[SENT]) for name, _, counts in named if counts and name.strip() != b"lo")
