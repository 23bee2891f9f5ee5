"""Links between a worker and a parameter server: how gradients and shards travel. Requests always travel over gloo.

    HostLink    gloo, through host memory
    NcclLink    between GPUs: a communicator for every pair of a worker and a server

A receive of NCCL occupies the GPU until its message arrives. It is therefore posted only after gloo has announced the
message, when the other end posts its send:

    worker   request ─gloo─→ send ══NCCL══→ sent ─gloo─→  ...  ←─gloo─ reply   receive ←══NCCL══
    server         announced: receive       complete     update        announced: send

If a worker is lost, gloo tells the server, which aborts only this worker's communicator.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

TAG: Final = 7101  # of messages to a server; replies have the next one
CTAS: Final = 4  # thread blocks per message of NCCL


class Link(Protocol):
    """The tensors between one worker and one server. Each method is called at one end, in the order shown above."""

    def push(self, gradient: Tensor) -> Callable[[], object]:
        """Begin to send a gradient that the current stream computed; the returned function waits until it is sent."""

    def pushed(self, into: Tensor) -> None:
        """Receive a gradient on the server.

        Raises:
            RuntimeError: if the worker is lost.
        """

    def reply(self, shard: Tensor) -> None:
        """Send a shard, which must not change before the worker's next request."""

    def replied(self, into: Tensor) -> None:
        """Receive a shard on the worker."""

    def close(self) -> None:
        """Free the communicator, also while a message waits for a peer that is lost."""


class HostLink:
    """A link over gloo. The tensors are in host memory."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group, self._peer = group, peer

    def push(self, gradient: Tensor) -> Callable[[], object]:
        """Begin to send a gradient."""
        work = dist.isend(gradient, group=self._group, group_dst=self._peer, tag=TAG)
        return work.wait if work is not None else lambda: None

    def pushed(self, into: Tensor) -> None:
        """Receive a gradient."""
        dist.recv(into, group=self._group, group_src=self._peer, tag=TAG)

    def reply(self, shard: Tensor) -> None:
        """Send a shard."""
        dist.send(shard, group=self._group, group_dst=self._peer, tag=TAG + 1)

    def replied(self, into: Tensor) -> None:
        """Receive a shard."""
        dist.recv(into, group=self._group, group_src=self._peer, tag=TAG + 1)

    def close(self) -> None:
        """Do nothing: the group outlives the link."""


class NcclLink:
    """A communicator of two ranks. The tensors are on this rank's CUDA device.

    Creating it is a collective of both ranks. It sends one number each way, because the first messages connect.
    """

    def __init__(self, group: dist.ProcessGroup, way: tuple[int, int], device: torch.device) -> None:
        mine, rank = group.rank(), way.index(group.rank())
        self._group, self._peer, self._other = group, way[1 - way.index(mine)], 1 - rank
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = group._get_backend(torch.device("cpu")).options._timeout
        options.config.max_ctas = CTAS
        name, store = f"servers/{group.group_name}/{way[0]}-{way[1]}", group.get_group_store()
        earlier = (store.add(name, 1) - 1) // 2  # links of these ranks that other optimizers made
        store = PrefixStore(f"{name}/{earlier}", store)
        self._communicator: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
        self._sent = torch.zeros(1)
        number = torch.zeros(1, device=device)
        for sends in (0, 1):
            (self._send if rank == sends else self._receive)(number)
        torch.cuda.synchronize(device)

    def push(self, gradient: Tensor) -> Callable[[], object]:
        """Begin to send a gradient; the returned function waits for it and confirms it over gloo."""
        work = self._communicator.send([gradient], self._other, 0)

        def confirm() -> None:
            work.wait()  # the current stream waits, not the host
            torch.cuda.current_stream(gradient.device).synchronize()
            dist.send(self._sent, group=self._group, group_dst=self._peer, tag=TAG)

        return confirm

    def pushed(self, into: Tensor) -> None:
        """Receive a gradient. Only gloo's message is waited for, because it does not come if the worker is lost."""
        self._receive(into)
        dist.recv(self._sent, group=self._group, group_src=self._peer, tag=TAG)

    def reply(self, shard: Tensor) -> None:
        """Begin to send a shard."""
        self._send(shard)

    def replied(self, into: Tensor) -> None:
        """Receive a shard, and wait for it: after the worker's next request the server may overwrite it."""
        self._receive(into)
        torch.cuda.current_stream(into.device).synchronize()

    def close(self) -> None:
        """Abort the communicator, which ends kernels that wait for the peer."""
        self._communicator.abort()

    def _send(self, tensor: Tensor) -> None:
        self._communicator.send([tensor], self._other, 0).wait()

    def _receive(self, tensor: Tensor) -> None:
        self._communicator.recv([tensor], self._other, 0).wait()


def uses_nccl(device: torch.device) -> bool:
    """Return whether tensors on a device travel over NCCL: on GPUs, if the default group does."""
    return device.type == "cuda" and "nccl" in dist.get_backend()


def open_links(group: dist.ProcessGroup, servers: Sequence[int], device: torch.device) -> dict[tuple[int, int], Link]:
    """Open this rank's links, by (worker, server): a collective of a gloo group."""
    rank, ways = group.rank(), [(worker, server) for worker in range(group.size()) for server in servers]
    links: dict[tuple[int, int], Link] = {}
    # All ranks open their links in the same order, because opening one waits for the other rank.
    for worker, server in ways:
        if worker != server and rank in (worker, server):
            peer = server if rank == worker else worker
            links[worker, server] = (
                NcclLink(group, (worker, server), device) if uses_nccl(device) else HostLink(group, peer)
            )
    return links
