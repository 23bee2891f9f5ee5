"""Orders of the rank parent to a rank that outlives an attempt: JSON lines over a socket opened before the fork.

    {"rank": 1, "attempt": 3, "env": {...}, "out": ..., "err": ..., "cores": [...], "threads": 1, "payload": {...}}

An order is the rank's start order (`rank_start.py`) for the next attempt. A rank in a collective cannot read it, and a
gloo collective may wait for a silent peer for a long time. So a thread of the rank reads the orders. If an order comes
while the rank works, the thread closes the rank's connections from outside (`cut`), until the rank asks for the order.
A process without a rank parent gets no orders.
"""

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from muster.jobs.basics.reading import Lines

CHUNK: Final = 1 << 16
AGAIN_S: Final = 0.02  # a rank that is about to connect opens connections after the first cut


class Orders:
    """The rank's end of the socket. `descriptor` is None in a process that gets no orders."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._socket = None if descriptor is None else socket.socket(fileno=descriptor)
        self._changed = threading.Condition()
        self._order: Mapping[str, Any] | None = None
        self._cut: Callable[[], None] | None = None
        self._is_closed = descriptor is None
        self._pid = os.getpid()

    @property
    def are_possible(self) -> bool:
        """True if a rank parent can send orders to this process."""
        return not self._is_closed

    @property
    def has_come(self) -> bool:
        """True if an order has come that the rank has not taken yet."""
        return self._order is not None

    def listen(self) -> None:
        """Start the thread that reads orders. Call this once, in the process of the rank."""
        if self._socket is not None:
            threading.Thread(target=self._read, args=(self._socket,), name="orders", daemon=True).start()

    def work(self, cut: Callable[[], None]) -> None:
        """Begin work that an order shall interrupt: `cut` is then called again and again, in another thread."""
        with self._changed:
            self._cut = cut
            self._changed.notify_all()

    def next(self, timeout_s: float | None) -> Mapping[str, Any] | None:
        """Wait for an order, and end the work; return None after `timeout_s`, or if no order can come any more."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            self._cut = None
            while self._order is None and not self._is_closed and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
            order, self._order = self._order, None
            return order

    def _read(self, orders: socket.socket) -> None:
        lines = Lines()
        while data := _receive(orders):
            for line in lines.of(data):
                with self._changed:
                    self._order = json.loads(line)  # a newer order replaces one that was not taken
                    self._changed.notify_all()
                threading.Thread(target=self._interrupt, name="cut", daemon=True).start()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _interrupt(self) -> None:
        """Cut the connections until the rank has taken the order."""
        with self._changed:
            order = self._order
            while order is not None and self._order is order:
                if self._cut is not None:
                    self._cut()
                self._changed.wait(AGAIN_S)


def _receive(orders: socket.socket) -> bytes:
    try:
        return orders.recv(CHUNK)
    except OSError:
        return b""


own = Orders()  # the orders of this process; in a forked rank, the rank parent replaces it
