"""Messages between GPUs of several hosts: a communicator of two ranks for each way between them.

    compute   F0 ─┬─ F1 ─┬─ F2          a send waits for the stream that computed what it sends, nothing for the send
    outgoing      └send  └send
    incoming   receive    receive       a receive waits for the last use of its buffer, not for what was launched since

NCCL has no tags, and messages of one communicator wait for each other: what goes one way keeps its order, which the
schedule's program has proved to be the same at both ends, and no way waits for another. No communicator is split off
another one, which would be a collective of ranks outside the pipeline.
"""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from threading import Thread
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from muster.ddp.means import beside
from muster.pipe.wires.wire import Mark, WorkMessage, flat

CTAS: Final = 4  # thread blocks of a message at most: while it waits they take as many multiprocessors


class NcclWire:
    """Communicators of a rank with each of its peers: one for what goes there, one for what comes.

    Building one is a collective: all ranks of the group do so, each with its own peers.
    """

    ordered = True

    def __init__(
        self, group: dist.ProcessGroup, peers: Iterable[int], device: torch.device, timeout: timedelta
    ) -> None:
        self._rank, self._device = group.rank(), device
        self._names = dist.get_process_group_ranks(group)  # of ranks, in the world
        self._outgoing, self._incoming = beside(device), beside(device)
        self._ways: dict[tuple[int, int], Any] = {}
        # Pairs in one order on all ranks: to meet is to wait for the other.
        for low, high in sorted((min(peer, self._rank), max(peer, self._rank)) for peer in peers):
            for way in ((low, high), (high, low)):
                options: Any = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                options.config.max_ctas = CTAS
                store = PrefixStore(f"pipe/{group.group_name}/{way[0]}-{way[1]}", group.get_group_store())
                self._ways[way] = dist.ProcessGroupNCCL(store, int(self._rank == high), 2, options)
                self._greet(way)

    def mark(self) -> Mark:
        """Mark what has been launched so far as what a receive has to wait for."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def expect(self, backlogs: Mapping[tuple[int, int], int]) -> None:
        """Keep nothing ready: a send waits until it is received."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> WorkMessage:
        """Begin to send what the current stream computes."""
        self._outgoing.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outgoing):
            work = self._ways[self._rank, peer].send([flat(tensor)], int(peer > self._rank), 0)
        return WorkMessage(work, self._names[peer])

    def receive(self, tensor: Tensor, peer: int, tag: int, after: Mark = None) -> WorkMessage:
        """Begin to receive after a mark; without one after all that was launched."""
        if after is None:
            self._incoming.wait_stream(torch.cuda.current_stream(self._device))
        else:
            self._incoming.wait_event(after)
        with torch.cuda.stream(self._incoming):
            work = self._ways[peer, self._rank].recv([flat(tensor)], int(peer > self._rank), 0)
        return WorkMessage(work, self._names[peer])

    def abort(self) -> None:
        """Abort all communicators: kernels that wait for a peer end.

        All at once: each gives memory back, and that waits for the whole device, so for the others' kernels.
        """
        aborting = [Thread(target=way.abort) for way in self._ways.values()]
        for each in aborting:
            each.start()
        for each in aborting:
            each.join()

    def _greet(self, way: tuple[int, int]) -> None:
        """Send one number: the first message makes the communicator, and waits for the other rank with it."""
        number = torch.zeros(1, device=self._device)
        if way[0] == self._rank:
            self.send(number, way[1], 0).wait()
        else:
            self.receive(number, way[0], 0).wait()
        torch.cuda.synchronize(self._device)
