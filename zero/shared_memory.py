"""Shared memory between the ranks of one host, on CPUs: each rank maps the tensors of all other ranks.

    rank 0's memory   | shard 0 | ....... |      each rank keeps tensors that the others need in shared memory; they
    rank 1's memory   | ....... | shard 1 |      read from it, so nothing goes through a socket

A shared tensor lies in an anonymous file (memfd_create(2)), which the other ranks map through /proc/PID/fd. Barriers
("meetings", all-reduces of one number over the group) separate writing from reading.

With exact sums, or with two ranks, results are bitwise identical to those without shared memory. Otherwise stages 1 and
3 add gradients in a different order from a ring, so the last bits on one host may differ from those on several hosts.
"""

import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from muster.ddp.checks import gather_json
from muster.ddp.means import Group, Wait

CPU: Final = torch.device("cpu")
TOKEN_BYTES: Final = 16


class SharedMemoryPeers:
    """The ranks of a group in which every rank can map the memory of all others."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def share(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[list[Tensor]]:
        """Create flat tensors of zeros, and map those of all ranks. A collective.

        Return one list per size, with the tensors of all ranks.

        Raises:
            RuntimeError: On every rank, if a rank could not create or map a tensor.
        """
        own: list[int] = []
        shared: list[list[Tensor]] = [[] for _ in sizes]

        def create() -> None:
            own.extend(_file(elements * dtype.itemsize) for elements, dtype in sizes)

        def map_all() -> None:
            for pid, descriptors in places.values():
                for tensors, descriptor, (elements, dtype) in zip(shared, descriptors, sizes, strict=True):
                    tensors.append(_mapped(pid, descriptor, elements, dtype))

        try:
            self._together(create, "created")
            places = gather_json([os.getpid(), own], self.group, CPU)
            self._together(map_all, "mapped")
        finally:
            for descriptor in own:
                os.close(descriptor)
        return shared

    def _together(self, do: Callable[[], None], done: str) -> None:
        """Call `do` on every rank. If it fails on one, raise an error on all. A collective."""
        failed = ""
        try:
            do()
        except (OSError, RuntimeError) as error:
            failed = str(error).splitlines()[0]
        ended = gather_json(failed, self.group, CPU)
        if any(ended.values()):
            told = "; ".join(f"rank {rank}: {why}" for rank, why in ended.items() if why)
            raise RuntimeError(f"shared memory between the ranks of this host could not be {done}: {told}")

    def meeting(self) -> Wait:
        """Begin a barrier, and return a function that waits for it. All ranks must begin barriers in the same order."""
        work = dist.all_reduce(torch.zeros(1), group=self.group, async_op=True)
        assert work is not None
        return once(work.wait)


def _file(size_bytes: int) -> int:
    """Create an anonymous file in memory, which exists while it is open or mapped. Return its descriptor."""
    descriptor = os.memfd_create("shard")
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def _mapped(pid: int, descriptor: int, elements: int, dtype: torch.dtype) -> Tensor:
    if not elements:
        return torch.empty(0, dtype=dtype)  # an empty range cannot be mapped
    storage = torch.UntypedStorage.from_file(f"/proc/{pid}/fd/{descriptor}", True, elements * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage)  # type: ignore[arg-type]


def shared_memory_peers(group: Group, device: torch.device) -> SharedMemoryPeers | None:
    """Return the group's ranks if all can map each other's memory, else None on every rank. A collective.

    Each rank tests this by reading a token from the memory of every other rank. The test fails between hosts, and if
    containers or user permissions hide processes.
    """
    if device.type == "cuda" or dist.get_world_size(group) == 1:
        return None
    token = secrets.token_bytes(TOKEN_BYTES)
    descriptor = -1
    try:
        descriptor = _file(TOKEN_BYTES)
        os.pwrite(descriptor, token, 0)
    except (AttributeError, OSError):  # the system is not Linux, or has no memory left
        pass
    told = [os.getpid(), descriptor, token.hex()]
    everybody = gather_json(told, group, device)
    reads_all = all(_reads(*each) for each in everybody.values())
    agreed = all(gather_json(reads_all, group, device).values())
    if descriptor >= 0:
        os.close(descriptor)
    return SharedMemoryPeers(group) if agreed else None


def _reads(pid: int, descriptor: int, token: str) -> bool:
    """Return whether a file has the other rank's token. In this PID namespace, another process may have the pid."""
    try:
        with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:  # noqa: PTH123 - no path, a link to an anonymous file
            return file.read(TOKEN_BYTES).hex() == token
    except OSError:
        return False


def once(do: Callable[[], Any]) -> Wait:
    """Return a wait function that calls `do` until `do` succeeds once, and does nothing afterwards."""
    left: list[Callable[[], Any]] = [do]

    def wait() -> None:
        if left:
            left[0]()
            left.clear()

    return wait


def at_once() -> None:
    """Return immediately: a wait function for cases in which there is nothing to wait for."""
