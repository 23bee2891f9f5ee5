"""Ranks that can read each other's memory: processes of one host and one user, on CPUs.

    rank 0's memory   | shard 0 | ....... |      each rank keeps what the others need where they can read it, and copies
    rank 1's memory   | ....... | shard 1 |      or adds up what it needs from there: nothing goes through a socket

A tensor that is shared lies in a file without a name (memfd_create(2)), which the other ranks map through
/proc/PID/fd. Who may read what, and when, is agreed upon in meetings: collectives of one number over the group.

With exact sums, and with two ranks, the bits are those of ranks that send messages. Otherwise stages 1 and 3 add the
gradients of more than two ranks up in another order than a ring does, so the last bits may differ between one host and
several.
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


class Neighbours:
    """The ranks of a group, all of which can map each other's memory."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def share(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[list[Tensor]]:
        """Make flat tensors of zeros that all ranks map; return for each size everybody's, by rank: a collective.

        Raises:
            RuntimeError: on every rank, if one could not make or map them.
        """
        own = [_file(elements * dtype.itemsize) for elements, dtype in sizes]
        places = gather_json([os.getpid(), own], self.group, CPU)
        shared: list[list[Tensor]] = [[] for _ in sizes]
        failed = ""
        try:
            for pid, descriptors in places.values():
                for tensors, descriptor, (elements, dtype) in zip(shared, descriptors, sizes, strict=True):
                    tensors.append(_mapped(pid, descriptor, elements, dtype))
        except (OSError, RuntimeError) as error:
            failed = str(error).splitlines()[0]
        ended = gather_json(failed, self.group, CPU)
        for descriptor in own:
            os.close(descriptor)
        if any(ended.values()):
            told = "; ".join(f"rank {rank}: {why}" for rank, why in ended.items() if why)
            raise RuntimeError(f"memory that the ranks of this host share could not be mapped: {told}")
        return shared

    def meeting(self) -> Wait:
        """Come to a meeting; what is returned waits until all have come. Every rank comes to all, in one order."""
        work = dist.all_reduce(torch.zeros(1), group=self.group, async_op=True)
        assert work is not None
        return once(work.wait)


def _file(size_bytes: int) -> int:
    """Return the descriptor of a file without a name, in memory, for as long as it is mapped or open."""
    descriptor = os.memfd_create("shard")
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def _mapped(pid: int, descriptor: int, elements: int, dtype: torch.dtype) -> Tensor:
    if not elements:
        return torch.empty(0, dtype=dtype)  # nothing cannot be mapped
    storage = torch.UntypedStorage.from_file(f"/proc/{pid}/fd/{descriptor}", True, elements * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage)  # type: ignore[arg-type]


def neighbours_of(group: Group, device: torch.device) -> Neighbours | None:
    """Return the group's ranks if all of them can read each other's memory, on every rank or on none: a collective.

    A trial decides: each rank maps a token of every other one. It fails between hosts, and where a container or
    another user hides processes.
    """
    if device.type == "cuda" or dist.get_world_size(group) == 1:
        return None
    token = secrets.token_bytes(TOKEN_BYTES)
    descriptor = -1
    try:
        descriptor = _file(TOKEN_BYTES)
        os.pwrite(descriptor, token, 0)
    except (AttributeError, OSError):  # not Linux; no memory
        pass
    told = [os.getpid(), descriptor, token.hex()]
    everybody = gather_json(told, group, device)
    reads_all = all(_reads(*each) for each in everybody.values())
    agreed = all(gather_json(reads_all, group, device).values())
    if descriptor >= 0:
        os.close(descriptor)
    return Neighbours(group) if agreed else None


def _reads(pid: int, descriptor: int, token: str) -> bool:
    """True when a process's file is here, and its: another one may have its number in this namespace."""
    try:
        with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:  # noqa: PTH123 - no path, a link to what has no name
            return file.read(TOKEN_BYTES).hex() == token
    except OSError:
        return False


def once(do: Callable[[], Any]) -> Wait:
    """Return a wait that does something the first time, and nothing if that succeeded."""
    left: list[Callable[[], Any]] = [do]

    def wait() -> None:
        if left:
            left[0]()
            left.clear()

    return wait


def at_once() -> None:
    """Wait for nothing."""
