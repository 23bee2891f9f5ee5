"""The rank's side of its writer process (jobs/checkpoint/writer.py): start it, send orders, receive messages, end it.

Nothing here blocks. Orders are tiny and there is only one at a time, so they fit the socket buffer of a frozen writer.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.reading import Lines
from muster.jobs.checkpoint.writer import SaveOrder
from muster.jobs.machine import linux

MESSAGE_BYTES: Final = 1 << 16
BURIED_S: Final = 0.2


class WriterGone(Exception):
    """The writer process has ended, or does not accept an order."""


class WriterProcess:
    """A writer process and the socket that connects it to this rank."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            argv = [*module_argv(sys.executable, "muster.jobs.checkpoint.writer"), "--fd", str(theirs.fileno())]
            with linux.signal_mask(signal.SIG_BLOCK):  # signals that ask for a save must not end the writer
                self.process = subprocess.Popen(
                    [*argv, "--parent", str(os.getpid())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
                )
        self._socket.setblocking(False)
        self._lines = Lines()

    def order(self, order: SaveOrder, memory: int) -> None:
        """Send an order, with the descriptor of the memory that it refers to.

        Raises:
            WriterGone: if the order cannot be sent.
        """
        text = linux.memory_file("muster-order")
        try:
            with os.fdopen(os.dup(text), "wb") as file:
                file.write(order.text().encode())
            socket.send_fds(self._socket, [b'{"do": "save"}\n'], [memory, text])
        except (BrokenPipeError, ConnectionResetError, BlockingIOError) as error:
            raise WriterGone from error
        finally:
            os.close(text)

    def give_up(self, step: int) -> None:
        """Order the writer to stop waiting for the other writers of a save."""
        try:
            self._socket.send((json.dumps({"do": "give_up", "step": step}) + "\n").encode())
        except (BrokenPipeError, ConnectionResetError, BlockingIOError):
            return  # the writer is gone or frozen: the wait for its answer will time out

    def messages(self, *, wait_s: float = 0.0) -> Iterator[dict[str, Any]]:
        """Yield the writer's messages, after waiting for at most `wait_s` for the first one.

        Raises:
            WriterGone: if the writer has ended.
        """
        if wait_s > 0.0:
            select.select([self._socket], [], [], wait_s)
        while True:
            try:
                data = self._socket.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            if not data:
                raise WriterGone
            yield from map(json.loads, self._lines.of(data))

    def end(self) -> None:
        """Kill the writer. A writer that is stuck in a disk operation dies when the operation returns: do not wait."""
        self._socket.close()
        self.process.kill()  # SIGKILL, which also ends a frozen process
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(BURIED_S)
