"""The memory of one node for checkpoints: the shards of its own ranks, and those of another node.

    writer of a rank ── shard, .ok ──► folder in /dev/shm ──► the node that keeps our copies          (a thread)
                                              ▲──────────── the node whose copies we keep             (a thread each,
                                                                              after its proof: `launch/wire/door.py`)
    supervisor ◄── Kept ── for every shard here;  Complete ──► mark, and delete what is older

The folder belongs to the user, has a random name and mode 0700, and is deleted when the agent ends. A killed agent
leaves it behind; the next agent of the same user on this host deletes it, because nobody holds its lock any more.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from muster.jobs.basics.errors import MusterError, UnreachableError
from muster.jobs.basics.files import write_secret
from muster.jobs.basics.handshake import HandshakeError, node_key
from muster.jobs.basics.terminal import warn
from muster.jobs.checkpoint.names import position, step_and_attempt
from muster.jobs.checkpoint.remote import KEY, QUIET_S, READER, FileConnection, dialled
from muster.jobs.checkpoint.shard import ShardRecord
from muster.jobs.hosts.ranks import MEMORY
from muster.jobs.machine import ports
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.node.copy_pace import CopyPace
from muster.launch.node.copy_reads import Shards, prepare
from muster.launch.node.copy_requests import Answering, proved, put, record_of, writers_in
from muster.launch.wire import messages as wire
from muster.launch.wire.channel import ChannelClosed
from muster.launch.wire.door import BACKLOG, Door

SHARED_MEMORY: Final = Path("/dev/shm")
LOCK: Final = "lock"
LOCKED_S: Final = 60.0
LOOK_S: Final = 0.05
MOST_CONNECTIONS: Final = 32
NICE: Final = 19  # of threads

Tell = Callable[[wire.FromAgent], Awaitable[None]]


class Copies:
    """The folder in memory of one agent, and its threads. Nothing exists before the first KeepCopies or Fetch."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.run: RunDir | None = None
        self.why = ""  # why there is no folder
        self.attempt = 0
        self.secret = ""
        self.peer: wire.CopyTo | None = None
        self.complete = ""  # the newest checkpoint of which all nodes have their parts
        self.pace = CopyPace()
        self._fetching: wire.Fetch | None = None
        self._only_here: Shards = []  # shards of the fetched checkpoint whose other copy was on a lost node
        self._alone: Shards = []  # those of them that are to be copied now
        self._lock = -1
        self._address = ""
        self._door: Door | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = threading.Event()
        self._connections = threading.Semaphore(MOST_CONNECTIONS)
        self._tasks: set[asyncio.Task[None]] = set()  # the loop alone does not keep a task alive
        self._seen: set[tuple[str, int]] = set()  # (checkpoint, shard) that need no copy from here any more

    # Orders of the supervisor ---------------------------------------------------------------------------------------

    async def keep(self, message: wire.KeepCopies) -> None:
        """Create the folder and listen, unless that has been done; answer with the port."""
        self._open(message.secret)
        self.attempt, self.peer = message.attempt, None
        if self._door is None and self.run is not None:
            try:
                listening = ports.bind(message.bind, backlog=BACKLOG)
                self._address = f"{message.bind}:{listening.getsockname()[1]}"
            except OSError:  # behind address translation, this host does not have the address by which it is reached
                listening = ports.bind("", backlog=BACKLOG)
            self._door = Door(self._admit, more=MOST_CONNECTIONS, report=warn)
            self._door.open(listening)
        port = 0 if self._door is None else self._door.port
        await self.tell(wire.Keeping(message.attempt, port, self.why))

    def copy_to(self, message: wire.CopyTo) -> None:
        """From now on, copy the shards of this node's ranks to another node, and those that only this node has."""
        if message.attempt != self.attempt:
            return
        self.peer = message
        self._alone = [each for each in self._only_here if each[0].name == self.complete]

    def mark(self, message: wire.Complete) -> None:
        """Mark a checkpoint as complete on all nodes, and delete those before it."""
        self.complete = message.name
        self._fetching = None if message.only else self._fetching
        for folder in self._folders():
            if folder.name == message.name:
                with contextlib.suppress(OSError):
                    folder.complete.touch()
            elif message.only or position(folder.name) < position(message.name):
                self._delete(folder)

    async def fetch(self, message: wire.Fetch) -> None:
        """Prepare the reading of a checkpoint that is in the memory of several nodes."""
        self._open(message.secret)
        self._fetching, digest, why = message, "", self.why

        def is_wanted() -> bool:
            return self._fetching is message and not self._ended.is_set()

        if self.run is not None:
            try:
                digest, self._only_here = await asyncio.to_thread(prepare, self.run, self.secret, message, is_wanted)
            except (MusterError, OSError, ValueError) as error:
                why = str(error)
        if self._fetching is message:
            await self.tell(wire.Fetched(message.attempt, message.name, digest, why[:1000]))

    def environment(self) -> Mapping[str, str]:
        """Return the variable by which ranks find the folder; nothing if none was ordered."""
        if not self.secret:
            return {}
        return {MEMORY: str(self.run.path if self.run is not None else SHARED_MEMORY / "muster-unavailable")}

    def close(self) -> None:
        """End the threads, and free the memory."""
        self._ended.set()
        if self._door is not None:
            self._door.close()
        if self.run is not None:
            gone = self.run.path.with_suffix(".gone")
            with contextlib.suppress(OSError):
                self.run.path.rename(gone)  # so that no thread adds a file while the folder is deleted
                shutil.rmtree(gone)
            os.close(self._lock)
            self.run = None

    # The folder -----------------------------------------------------------------------------------------------------

    def _open(self, secret: str) -> None:
        if self.secret:
            return
        self.secret, self._loop = secret, asyncio.get_running_loop()
        try:
            delete_leftovers(SHARED_MEMORY)
            path = Path(tempfile.mkdtemp(prefix=prefix(), dir=SHARED_MEMORY))
            self._lock = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            write_secret(path / KEY, node_key(secret, READER))
        except (OSError, MusterError) as error:
            self.why = f"{SHARED_MEMORY}: no folder for copies in memory: {getattr(error, 'strerror', error)}"
            return
        self.run = RunDir(path)
        self._spawn(self._watch)

    def _folders(self) -> Iterator[CheckpointDir]:
        """List the checkpoints, oldest first."""
        if self.run is None:
            return
        with contextlib.suppress(FileNotFoundError):
            paths = {path: found for path in self.run.checkpoints.iterdir() if (found := step_and_attempt(path.name))}
            yield from map(CheckpointDir, sorted(paths, key=paths.__getitem__))

    def _delete(self, folder: CheckpointDir) -> None:
        shutil.rmtree(folder.path, ignore_errors=True)
        self._seen -= {key for key in self._seen.copy() if key[0] == folder.name}

    def _spawn(self, work: Callable[[], None]) -> None:
        def run() -> None:
            with contextlib.suppress(OSError):  # not to disturb the ranks; niceness belongs to a thread on Linux
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            work()

        threading.Thread(target=run, daemon=True).start()

    def _report(self, folder: CheckpointDir, record: ShardRecord) -> None:
        """Report a shard, from a thread."""
        loop, number = self._loop, self.attempt
        assert loop is not None
        shard = wire.Kept(number, folder.name, record.writer, record.writers, record.bytes, record.sha256)

        async def tell() -> None:
            with contextlib.suppress(ChannelClosed):  # the agent's main loop notices it, too
                await self.tell(shard)

        def begin() -> None:
            self._tasks.add(task := loop.create_task(tell()))
            task.add_done_callback(self._tasks.discard)

        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(begin)

    # To the node that keeps our copies ------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Report new shards of this node's ranks, and copy them."""
        waiting: Shards = []
        while not self._ended.wait(LOOK_S):
            alone, self._alone = self._alone, []
            waiting += alone
            with contextlib.suppress(OSError):  # no descriptor is free: look again
                for each in self._news():
                    waiting.append(each)  # not lost if a later one fails
            peer, self_attempt = self.peer, self.attempt
            waiting = [each for each in waiting if each[0].path.exists() and not each[0].failed.exists()]
            if peer is None or peer.attempt != self_attempt:
                continue
            for folder, record in waiting:
                self._copy(peer, folder, record)
            waiting = []

    def _news(self) -> Iterator[tuple[CheckpointDir, ShardRecord]]:
        """Find shards that ranks of this node have written; delete checkpoints that will never be complete."""
        folders = [*self._folders()]
        for folder in folders[:-1]:
            if folder.name != self.complete and folder.failed.exists():
                self._delete(folder)
        for folder in folders:
            new = (each for each in writers_in(folder) if (folder.name, each) not in self._seen)
            for record in filter(None, (record_of(folder, each) for each in new)):
                self._expect(folder, record.writer)
                self.pace.shard(folder.name, record.bytes, time.monotonic())
                self._report(folder, record)
                yield folder, record

    def _copy(self, peer: wire.CopyTo, folder: CheckpointDir, record: ShardRecord) -> None:
        if not peer.address:
            return
        try:
            with dialled(peer.address, peer.port, self.secret) as connection:
                put(connection, folder, record, self._pause)
        except (MusterError, OSError) as error:
            with contextlib.suppress(OSError):
                folder.failed.write_text(f"no copy on {peer.node}: {error}", encoding="utf-8")

    def _pause(self, count: int) -> None:
        """Pause before sending `count` bytes.

        Raises:
            UnreachableError: if the agent ends.
        """
        if self._ended.wait(self.pace.pause_s(count)):
            raise UnreachableError("this agent ends")

    # From other nodes -----------------------------------------------------------------------------------------------

    async def _admit(self, connection: socket.socket) -> None:
        """Require a proof that the other end belongs to the run. Then answer it in a thread."""
        assert self._door is not None
        may_put = await proved(connection, self._address, self.secret, self._door.has_greeted)
        if self.run is None or not self._connections.acquire(blocking=False):
            raise HandshakeError("too many copies at once")
        connection.settimeout(QUIET_S)
        self._spawn(partial(self._serve, connection, Answering(self.run, self._expect), may_put))

    def _serve(self, connection: socket.socket, answering: Answering, may_put: bool) -> None:
        try:
            with connection, connection.makefile("rb") as reader, contextlib.suppress(OSError, MusterError):
                end = FileConnection(connection, reader, may_put)
                while True:  # until the other end closes the connection
                    if (found := answering.answer(end)) is not None:
                        self._report(*found)
        finally:
            self._connections.release()

    def _expect(self, folder: CheckpointDir, writer: int) -> None:
        self._seen.add((folder.name, writer))


def prefix() -> str:
    """Return the beginning of the names of this user's folders."""
    return f"muster-{os.geteuid()}-"


def delete_leftovers(root: Path) -> None:
    """Delete the folders of agents of this user that were killed. The kernel has released their locks."""
    for path in root.glob(f"{prefix()}*"):
        try:
            status = path.lstat()
            if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
                continue
            if time.time() - status.st_mtime < LOCKED_S:  # its agent may be about to lock it
                continue
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        finally:
            os.close(lock)
        shutil.rmtree(path, ignore_errors=True)
