"""The agent's end of the socket to its rank parent: JSON lines and, once per attempt, a file descriptor.

The other end is `jobs/node/rank_parent.py`. asyncio cannot send descriptors, so a descriptor is sent through a second
handle of the same socket while asyncio's queue is empty. Each order is sent completely before the next one begins.
"""

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from muster.jobs.basics.boot import CODE_ROOT, job_argv, module_argv
from muster.jobs.basics.errors import RefusedError
from muster.jobs.machine import linux
from muster.launch.common.limits import restore_open_files
from muster.launch.wire.channel import START_BYTES

CHUNK: Final = 1 << 16
OTHER_PYTHON: Final = "correct `python` in the job file"
WARM: Final = "muster.jobs.node.warm"
END_S: Final = 5.0  # a rank parent stops its ranks within 1 s, then sweeps
TIMES: Final = 6  # maximum number of waits of END_S each while the rank parent still runs


def start_warm(
    sockets: Sequence[socket.socket], *, python: str, of_job: Sequence[str], preload: str, env: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start a warm process that forks one rank parent per socket.

    The warm process gets its own session, so that a terminal's Ctrl-C does not reach it or its ranks. `of_job`: the
    command of the job's own Python. If it is empty, the warm process runs in `python`, Muster's own.

    Raises:
        OSError: if the Python cannot be run.
    """
    descriptors = [each.fileno() for each in sockets]
    argv = job_argv(of_job, WARM) if of_job else module_argv(python, WARM)
    argv += ["--fds", ",".join(map(str, descriptors)), "--preload", preload]
    warm = subprocess.Popen(
        argv,
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        env=env,
        start_new_session=True,
    )
    restore_open_files(warm.pid)
    return warm


class RankParentLink:
    """The connection to a rank parent. If no socket was inherited, `open` starts the warm process."""

    def __init__(self, rank_parent: socket.socket | None) -> None:
        self.rank_parent = rank_parent
        self._warm: subprocess.Popen[bytes] | None = None
        self._of_job: Sequence[str] = ()
        self._has_begun = False  # the warm process has reported that it runs
        self._pid = 0
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._one_order = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """True once the connection has been opened."""
        return self._writer is not None

    async def open(self, *, preload: str, env: dict[str, str], of_job: Sequence[str] = ()) -> None:
        """Open the connection. Orders wait in the socket until the rank parent has finished its imports.

        `env`: the complete environment of a warm process. `of_job`: as for `start_warm`.

        Raises:
            RefusedError: if the job's Python cannot be run.
        """
        self._of_job = of_job
        if self.rank_parent is None:
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    self._warm = start_warm([theirs], python=sys.executable, of_job=of_job, preload=preload, env=env)
                except OSError as error:
                    ours.close()
                    if not of_job:
                        raise
                    raise RefusedError(f"python: {of_job[0]}: {error.strerror}; {OTHER_PYTHON}") from error
            self.rank_parent = ours
        copy = self.rank_parent.dup()  # one handle for asyncio, one for passing descriptors
        self._reader, self._writer = await asyncio.open_unix_connection(sock=copy, limit=START_BYTES)
        self._writer.transport.set_write_buffer_limits(high=0)  # so that drain() waits for the last byte

    @property
    def unusable(self) -> str:
        """The reason why the job's Python did not run the warm process, "" if it did. Valid after `messages` ends."""
        if self._has_begun or not self._of_job:
            return ""
        return (
            f"python: {shlex.join(self._of_job)}: ended before it could start ranks; it must be Python 3.10 or newer, "
            f"inherit open files and be able to read {CODE_ROOT}; {OTHER_PYTHON}"
        )

    async def give_store(self, listening: socket.socket, attempt: int) -> None:
        """Send the bound socket of the store. If the rank parent has ended, do nothing: `messages` then ends."""
        assert self.rank_parent is not None
        order = (json.dumps({"do": "store", "attempt": attempt}) + "\n").encode()
        async with self._one_order:
            while True:
                try:
                    socket.send_fds(self.rank_parent, [order], [listening.fileno()])
                except BlockingIOError:  # nothing was sent: this send is all or nothing
                    await self._until_writable()
                except ConnectionError:
                    return
                else:
                    return

    async def order(self, message: dict[str, Any]) -> None:
        """Send an order. If the rank parent has ended, do nothing; `messages` then ends."""
        assert self._writer is not None
        async with self._one_order:
            try:
                self._writer.write((json.dumps(message) + "\n").encode())
                await self._writer.drain()
            except ConnectionError:
                return

    async def _until_writable(self) -> None:
        assert self.rank_parent is not None
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_writer(self.rank_parent, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(self.rank_parent)

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the rank parent's messages until it closes the connection."""
        assert self._reader is not None
        while True:
            try:
                line = await self._reader.readline()
            except ConnectionError:
                return
            if not line:
                return
            message = json.loads(line)
            self._pid = message.get("ready", self._pid)
            if "begun" in message:
                self._has_begun = True
            else:
                yield message

    async def close(self) -> None:
        """Close the connection, and wait until the rank parent and its ranks have ended. Kill them if it is frozen."""
        if self.rank_parent is None:
            return
        try:
            if self.is_open:
                self.rank_parent.shutdown(socket.SHUT_WR)
                hung_up = asyncio.ensure_future(self._hear_out(self.rank_parent))
                if not await self._ends(hung_up) and self._pid:
                    linux.kill_quietly(self._pid, signal.SIGKILL)
        except OSError:  # the rank parent has already ended
            pass
        self.rank_parent.close()
        if self._writer is not None:
            self._writer.close()
        await self._end_warm()

    async def _ends(self, hung_up: "asyncio.Future[None]") -> bool:
        """Wait until the rank parent closes the connection; return False if it neither runs nor waits to run."""
        for _ in range(TIMES):
            _, before = linux.signs_of_life(self._pid)
            await asyncio.wait([hung_up], timeout=END_S)
            if hung_up.done():
                await hung_up
                return True
            starved, switches = linux.signs_of_life(self._pid)
            if not starved and switches == before:
                break
        hung_up.cancel()
        return False

    async def _end_warm(self) -> None:
        """Wait for the warm process, if this link started it. It ends when all of its descendants have ended."""
        if self._warm is None:
            return
        try:
            await asyncio.to_thread(self._warm.wait, END_S)
        except subprocess.TimeoutExpired:  # one of its descendants cannot be killed
            self._warm.kill()
            await asyncio.to_thread(self._warm.wait)

    async def _hear_out(self, rank_parent: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        os.set_blocking(rank_parent.fileno(), False)
        while await loop.sock_recv(rank_parent, CHUNK):
            pass
