"""Send tensors between GPUs of several hosts: a communicator of two ranks for each direction.

    compute   F0 ─┬─ F1 ─┬─ F2          a send waits for the stream that computed its tensor; nothing waits for the send
    outgoing      └send  └send
    incoming   receive    receive       a receive waits for the last use of its buffer, not for later launches

NCCL has no tags, and messages of one communicator wait for each other. With one communicator per direction, no
direction waits for another. Within a direction messages keep their order, and `checks.py` proves that both ends use the
same order. The communicators are not created by splitting another one, because a split would be a collective that
includes ranks outside the pipeline.
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

CTAS: Final = 4  # thread blocks per message; each block occupies a multiprocessor while the message waits


class NcclWire:
    """Communicators of a rank with each of its peers, one per direction.

    Building one is a collective of all ranks of the group; each passes its own peers.
    """

    ordered = True

    def __init__(
        self, group: dist.ProcessGroup, peers: Iterable[int], device: torch.device, timeout: timedelta
    ) -> None:
        self._rank, self._device = group.rank(), device
        self._names = dist.get_process_group_ranks(group)  # world ranks, for error messages
        self._outgoing, self._incoming = beside(device), beside(device)
        self._ways: dict[tuple[int, int], Any] = {}
        self._not_aborted: list[Any] = []
        # All ranks create pairs in the same order, because creating one waits for the other rank.
        for low, high in sorted((min(peer, self._rank), max(peer, self._rank)) for peer in peers):
            for way in ((low, high), (high, low)):
                options: Any = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                options.config.max_ctas = CTAS
                store = PrefixStore(f"pipe/{group.group_name}/{way[0]}-{way[1]}", group.get_group_store())
                self._ways[way] = dist.ProcessGroupNCCL(store, int(self._rank == high), 2, options)
                self._not_aborted.append(self._ways[way])
                self._greet(way)

    def mark(self) -> Mark:
        """Record an event after all work launched so far; a receive can wait for it."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def expect(self, backlogs: Mapping[tuple[int, int], int]) -> None:
        """Do nothing: NCCL buffers no messages, so a send may wait for its receive."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> WorkMessage:
        """Begin to send a tensor that the current stream computes."""
        self._outgoing.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outgoing):
            work = self._ways[self._rank, peer].send([flat(tensor)], int(peer > self._rank), 0)
        return WorkMessage(work, self._names[peer])

    def receive(self, tensor: Tensor, peer: int, tag: int, after: Mark = None) -> WorkMessage:
        """Begin to receive after the mark, or after all work launched so far."""
        if after is None:
            self._incoming.wait_stream(torch.cuda.current_stream(self._device))
        else:
            self._incoming.wait_event(after)
        with torch.cuda.stream(self._incoming):
            work = self._ways[peer, self._rank].recv([flat(tensor)], int(peer > self._rank), 0)
        return WorkMessage(work, self._names[peer])

    def abort(self) -> None:
        """Abort all communicators, each once, which ends kernels that wait for a peer.

        The aborts run concurrently. Each abort frees memory, and this waits for all kernels of the device, including
        those of communicators that are not aborted yet.
        """
        ways, self._not_aborted = self._not_aborted, []
        aborting = [Thread(target=way.abort, daemon=True) for way in ways]
        for each in aborting:
            each.start()
        for each in aborting:
            each.join()

    def _greet(self, way: tuple[int, int]) -> None:
        """Send one number, because the first message creates the communicator and waits for the other rank."""
        number = torch.zeros(1, device=self._device)
        if way[0] == self._rank:
            self.send(number, way[1], 0).wait()
        else:
            self.receive(number, way[0], 0).wait()
        torch.cuda.synchronize(self._device)
