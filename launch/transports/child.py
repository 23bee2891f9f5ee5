"""A child process of the supervisor that carries or starts agents: ssh, pdsh, srun, or an agent on this machine.

asyncio's own subprocesses use one thread each on Python 3.10 and 3.11, so this module watches a pidfd
(pidfd_open(2)).
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Final

from muster.jobs.basics.errors import RefusedError
from muster.launch.common.limits import restore_open_files
from muster.launch.wire.channel import CHUNK, PRINTED_BYTES, Channel, over_pipes

KEPT_LINES: Final = 200  # last lines of standard error that are kept per process
LONGEST: Final = 1 << 16  # bytes that are kept of a line
FAREWELL_S: Final = 5.0
READING_S: Final = 1.0  # time limit for reading the rest of standard error after the process has ended


class Child:
    """A process in its own session, so that the terminal's Ctrl-C does not reach it. Create it in a running event loop.

    Raises:
        RefusedError: if its program cannot be run here.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        piped: bool,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        own_stderr: bool = True,
    ) -> None:
        try:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if own_stderr else None,
                pass_fds=pass_fds,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            raise RefusedError(f"{argv[0]}: cannot be run here: {error.strerror}; is it installed?") from error
        restore_open_files(self.process.pid)
        self.errors: list[str] = []  # the last lines of its standard error
        self.printed = b""  # the last bytes of its standard error, and of its standard output unless that is a channel
        self._piped = piped
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pidfd = os.pidfd_open(self.process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    async def channel(self, node: int) -> Channel:
        """Return a node's channel over the process's standard input and output."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        return await over_pipes(self.process.stdout, self.process.stdin, node=node)

    async def read_errors(self, tell: "asyncio.Queue[str] | None" = None) -> None:
        """Read standard error to its end. Keep the last lines, and put each line into the queue `tell`, if given."""

        def take(line: bytes) -> None:
            text = line.decode(errors="replace").rstrip()
            self.errors = [*self.errors[-KEPT_LINES:], text]
            if tell is not None:
                tell.put_nowait(text)

        assert self.process.stderr is not None
        assert self.process.stdout is not None
        reading = [self._read(self.process.stderr, take)]
        if not self._piped:
            reading.append(self._read(self.process.stdout, lambda line: None))
        await asyncio.gather(*reading)

    async def _read(self, stream: IO[bytes], take: Callable[[bytes], None]) -> None:
        """Read a stream to its end, and pass on its lines, also a line without an end. Cut long lines."""
        reader, rest = asyncio.StreamReader(), b""
        source, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), stream
        )
        try:
            while data := await reader.read(CHUNK):
                self.printed = (self.printed + data)[-PRINTED_BYTES:]
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    take(line[-LONGEST:])
                rest = rest[-LONGEST:]
            if rest:
                take(rest)
        finally:
            source.close()

    async def outcome(self) -> int:
        """Read standard error, wait for the end, and return the exit code."""
        reading = asyncio.create_task(self.read_errors())
        code = await asyncio.shield(self.ended)
        await asyncio.wait([reading], timeout=READING_S)  # a grandchild may hold standard error open
        return code

    async def end(self, wait_s: float = FAREWELL_S) -> None:
        """Wait for the process to end by itself, then send SIGTERM, then SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(self.ended), wait_s)
            if self.ended.done():
                return
            self.process.send_signal(number)
            wait_s = 1.0
        await self.ended

    def _reap(self) -> None:
        code = self.process.poll()
        if code is None:
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        if not self.ended.done():
            self.ended.set_result(code)
