"""The network connections of a rank: to the store, and to one process group. How to close them from another thread.

gloo cannot abort a collective. But if a connection closes, the collective fails at once, here and at the other end.
NCCL can abort its communicator: its kernels end, with wrong results, and the host continues. They may also send wrong
values to ranks that have aborted nothing yet. So nothing that follows a collective on the device may change the state
before the hosts of all ranks have seen the collective's end (`LivingState.check`).
"""

import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _world

from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.world.meeting import connect, prefix_of

OPEN: Final = Path("/proc/self/fd")
ABORT_S: Final = 3.0  # maximum wait for aborts; then the connections are shut down even if aborts have not ended
FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)


class StoreConnection:
    """A rank's connection to the store of the attempt. Attempts in place may share one store, and this connection."""

    def __init__(self) -> None:
        self._at = ("", 0)
        self._store: Store | None = None
        self.inodes: frozenset[int] = frozenset()

    def open(self, env: RankEnv, timeout_s: float, is_over: Callable[[], bool]) -> Store:
        """Return the store of an attempt; connect unless this rank already is connected. Errors as for `connect`."""
        at = (env.master_addr, env.master_port)
        if self._store is not None and at == self._at:
            return PrefixStore(prefix_of(env), self._store)
        self.drop()
        before = _sockets()
        store = connect(env, timeout_s, is_over)
        if env.agent_store:
            assert isinstance(store, PrefixStore)
            self._at, self._store, self.inodes = at, store.underlying_store, _sockets() - before
        return store

    def drop(self) -> None:
        """Forget the store, so that the next attempt connects anew."""
        self._store, self.inodes = None, frozenset()


class GroupConnections:
    """The TCP connections opened since this object was made, or until `complete` was called.

    The connection to the store counts as one of them until `complete`, because a rank may wait for an answer of it.
    """

    def __init__(self, store: StoreConnection) -> None:
        self._store = store
        self._before = _sockets() - store.inodes
        self._opened: frozenset[int] | None = None  # None: connections are still being made
        self._aborting: dict[dist.ProcessGroup, threading.Thread] = {}
        self._lock = threading.Lock()

    def complete(self) -> None:
        """Record that all connections have been made. Those that are opened later belong to something else."""
        self._opened = _sockets() - self._before - self._store.inodes

    def leave(self) -> None:
        """Forget the store if `cut` has closed it, too, which it does while connections are still being made."""
        if self._opened is None:
            self._store.drop()

    def cut(self) -> None:
        """Shut down all of these connections, and abort NCCL's communicators."""
        self._abort()
        for descriptor in _descriptors():
            with suppress(OSError):  # another thread has closed it
                copy = os.dup(descriptor)  # so that the number cannot be reused meanwhile
                try:
                    inode = _inode(copy)
                    is_ours = inode not in self._before if self._opened is None else inode in self._opened
                    if inode and is_ours:
                        _shut_down(copy)
                finally:
                    os.close(copy)

    def _abort(self) -> None:
        """Abort the communicators of all groups, each once, and wait for this for at most ABORT_S.

        The aborts run at the same time, because each one frees memory, and so waits for kernels of all communicators.
        """
        with self._lock:
            for group in [*_world.pg_map]:
                if group not in self._aborting and dist.get_backend(group) == "nccl":
                    self._aborting[group] = threading.Thread(target=group.abort, name="abort", daemon=True)
                    self._aborting[group].start()
            aborting = [*self._aborting.values()]
        deadline = time.monotonic() + ABORT_S
        for thread in aborting:
            thread.join(max(deadline - time.monotonic(), 0.0))


def leave_group() -> None:
    """Forget the process group of this process, so that another one can be created."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _sockets() -> frozenset[int]:
    """Return the inodes of this process's sockets."""
    return frozenset(inode for inode in map(_inode, _descriptors()) if inode)


def _descriptors() -> list[int]:
    return [int(path.name) for path in OPEN.iterdir()]


def _inode(descriptor: int) -> int:
    """Return the inode of a socket; 0 if the descriptor is closed or something else."""
    with suppress(OSError):
        status = os.fstat(descriptor)
        return status.st_ino if stat.S_ISSOCK(status.st_mode) else 0
    return 0


def _shut_down(descriptor: int) -> None:
    """Shut down a TCP connection. Leave sockets alone that listen, or belong to another family."""
    connection = socket.socket(fileno=os.dup(descriptor))
    with connection:
        is_tcp = connection.family in FAMILIES and connection.type == socket.SOCK_STREAM
        if is_tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)
