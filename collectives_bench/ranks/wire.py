"""Count the bytes that network interfaces send during calls, to compare a library with the formulas.

    window       barrier, read, barrier, k calls, barrier, read
    payload      bytes - headers x packets - retransmitted bytes
    a call       (smallest of some windows - smallest of some windows without calls) / k

The counters belong to the network namespace of this process, in which all ranks of a host share one loopback interface.
One rank per namespace reads the counters, and the results are summed. Other traffic only adds bytes, so the smallest
window is used, preferably one without retransmission. An acknowledgement consists only of headers, so it counts as 0.
Traffic that bypasses the interfaces (shared memory, NVLink, RDMA) is not counted, so this is for gloo.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from muster.collectives_bench.known import best_wire, known_wire
from muster.collectives_bench.ranks.facts import mtu
from muster.collectives_bench.records import BenchCell, WireBytes

COUNTERS: Final = Path("/proc/self/net/dev")
PROTOCOLS: Final = Path("/proc/self/net/snmp")
TIMESTAMPS: Final = Path("/proc/sys/net/ipv4/tcp_timestamps")
LOOPBACK: Final = "lo"
SENT_BYTES, SENT_PACKETS = 8, 9  # columns in a line of /proc/net/dev, counted after the name
ETHERNET, IP, TCP, STAMP = 14, 20, 20, 12  # bytes of headers; the loopback interface also counts an Ethernet header

WINDOW_BYTES: Final = 8 * 2**20  # least bytes sent in a window, so that a single foreign packet does not matter
MOST_CALLS: Final = 64
AGREE: Final = 0.003  # more windows are measured until the two smallest differ by no more than this
MOST_WINDOWS: Final = 8
MOST_LARGE_WINDOWS: Final = 3  # number for calls of more than LARGE bytes
LARGE: Final = 2**30


class WireCounter:
    """A counter of the payload sent by some interfaces of this network namespace. Every counted packet has one header.

    This also holds for packets of 64 KB that a card splits later: the interface counts them either before the split, or
    as pieces that each have a header.
    """

    def __init__(self, interfaces: Iterable[str]) -> None:
        self.interfaces = sorted(set(interfaces))
        self.header_bytes = header_bytes()
        cards = [found for each in self.interfaces if each != LOOPBACK and (found := mtu(each))]
        self._segment = min(cards) - (self.header_bytes - ETHERNET) if cards else 0
        self._begin = (0, 0, 0)

    def start(self) -> None:
        """Begin counting."""
        self._begin = self._read()

    def sent(self) -> float:
        """Return the payload bytes since `start`. If a network card is counted, retransmissions are subtracted."""
        sent, packets, again = (now - then for now, then in zip(self._read(), self._begin, strict=True))
        return max(0.0, float(sent - packets * self.header_bytes - again * self._segment))

    def sent_again(self) -> int:
        """Return the number of retransmitted segments that `sent` includes. It is 0 unless only loopback is counted."""
        return 0 if self._segment else self._read()[-1] - self._begin[-1]

    def _read(self) -> tuple[int, int, int]:
        """Return bytes, packets, and retransmitted segments."""
        sent = packets = 0
        for line in COUNTERS.read_text(encoding="utf-8", errors="replace").splitlines():
            name, colon, rest = line.partition(":")
            if colon and name.strip() in self.interfaces:
                fields = rest.split()
                sent += int(fields[SENT_BYTES])
                packets += int(fields[SENT_PACKETS])
        return sent, packets, _sent_again()


def interfaces_of(interface: str, *, alone: bool) -> list[str]:
    """Return the interfaces of the ranks' traffic: loopback if ranks share a host, and the interface to other hosts.

    Traffic from a host to its own addresses uses loopback, even if another interface has the address. `alone` is True
    if all ranks share one network namespace.
    """
    return [LOOPBACK] if alone or not interface else sorted({LOOPBACK, interface})


def header_bytes() -> int:
    """Return the header bytes of a TCP segment: 66 on IPv4, with Linux's default time stamps."""
    try:
        stamped = TIMESTAMPS.read_text(encoding="ascii").strip() != "0"
    except OSError:
        stamped = True
    return ETHERNET + IP + TCP + (STAMP if stamped else 0)


def audit(
    run: Callable[[], None], cell: BenchCell, nbytes: int, *, counter: WireCounter | None, control: dist.ProcessGroup
) -> WireBytes:
    """Count the bytes that all ranks send in one call. All ranks call this together, after a warm-up.

    `counter` is None on ranks that share a network namespace with a lower rank; rank 0 always has a counter. `control`
    is a gloo group of all ranks. The bytes of its own messages are subtracted.
    """
    ranks = control.size()
    known = known_wire(cell, nbytes, ranks)
    calls = calls_of(known)
    idle = min(_window(run, 0, counter, control) for _ in range(2)).payload
    windows = [_window(run, calls, counter, control) for _ in range(2)]
    # The sums are the same on every rank, so all ranks decide alike. If no payload is expected, two windows are enough.
    most = 0 if not known else MOST_WINDOWS if known <= LARGE else MOST_LARGE_WINDOWS
    while len(windows) < most and not _agree(windows, idle):
        windows.append(_window(run, calls, counter, control))
    return WireBytes(
        interfaces=counter.interfaces if counter is not None else [],
        calls=calls,
        sent_bytes=max(0.0, min(windows).payload - idle) / calls,
        best_bytes=best_wire(cell, nbytes, ranks),
        known_bytes=known,
    )


def calls_of(known_bytes: float) -> int:
    """Return the number of calls per window for a call of this many bytes."""
    return max(1, min(MOST_CALLS, math.ceil(WINDOW_BYTES / max(known_bytes, 1.0))))


class _Window(NamedTuple):
    """The traffic of all namespaces in one window.

    Retransmission is the first field, so that windows are sorted by it first.
    """

    sent_again: float  # segments
    payload: float  # bytes


def _agree(windows: list[_Window], idle: float) -> bool:
    first, second = sorted(windows)[:2]
    return not second.sent_again and second.payload - first.payload <= AGREE * max(first.payload - idle, 1.0)


def _window(run: Callable[[], None], calls: int, counter: WireCounter | None, control: dist.ProcessGroup) -> _Window:
    """Measure one window. All ranks get the same result."""
    dist.barrier(control)
    if counter is not None:
        counter.start()
    dist.barrier(control)  # no rank makes calls before all ranks have begun to count
    for _ in range(calls):
        run()
    dist.barrier(control)
    mine = (float(counter.sent_again()), counter.sent()) if counter is not None else (0.0, 0.0)
    total = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(total, group=control)
    return _Window(*total.tolist())


def _sent_again() -> int:
    """Return the number of segments that TCP has retransmitted in this namespace. Nearly all have full size."""
    lines = [line.split() for line in PROTOCOLS.read_text(encoding="ascii").splitlines() if line.startswith("Tcp:")]
    names, values = lines[0], lines[1]
    return int(values[names.index("RetransSegs")])
