"""Access to the queue of parts from every rank, over a gloo group: mode asynchronous.

rank 1    part 5, its loss ──→ │ thread for rank 1 │ ──→ the queue, on rank 0
          ←────────── part 9 ─ │                   │
"""

from threading import Thread
from typing import Final, Protocol

import torch
import torch.distributed as dist

from muster.jobs.train.work_queue import NONE, PartResult, WorkQueue

TAG: Final = 7201


class QueueAccess(Protocol):
    """A worker's access to the queue."""

    def exchange(self, part: int, result: PartResult | None) -> int:
        """Report a part's result (NONE: there was none); return the next part, or NONE at the end."""

    def join(self) -> None:
        """Wait until the queue is no longer needed by other ranks."""


class QueueServer:
    """The access of rank 0, which also answers the other ranks: one thread waits for each."""

    def __init__(self, queue: WorkQueue, group: dist.ProcessGroup, workers: int) -> None:
        self.queue = queue
        self.group = group
        self.lost: list[int] = []
        self._threads = [Thread(target=self._serve, args=(each,), daemon=True) for each in range(1, workers)]
        for thread in self._threads:
            thread.start()

    def exchange(self, part: int, result: PartResult | None) -> int:
        """Report the result of rank 0's own part; return its next one."""
        return self.queue.exchange(0, part, result)

    def join(self) -> None:
        """Wait until every other rank knows of the end, or is lost."""
        for thread in self._threads:
            thread.join()

    def _serve(self, worker: int) -> None:
        request = torch.empty(3, dtype=torch.float64)  # [part, sum of losses, staleness]
        part = 0
        try:
            while part != NONE:
                dist.recv(request, group=self.group, group_src=worker, tag=TAG)
                done, *values = request.tolist()
                part = self.queue.exchange(worker, int(done), None if done == NONE else PartResult(*values))
                dist.send(torch.tensor([part]), group=self.group, group_dst=worker, tag=TAG)
        except RuntimeError:  # gloo: the connection is closed
            self.lost.append(worker)
            self.queue.lose(worker)


class QueueClient:
    """The access of every rank but 0."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def exchange(self, part: int, result: PartResult | None) -> int:
        """Send a part's result to rank 0, and receive the next part."""
        values = (0.0, 0.0) if result is None else (result.loss_sum, result.staleness)
        dist.send(torch.tensor([part, *values], dtype=torch.float64), group=self.group, group_dst=0, tag=TAG)
        reply = torch.empty(1, dtype=torch.int64)
        dist.recv(reply, group=self.group, group_src=0, tag=TAG)
        return int(reply)

    def join(self) -> None:
        """Do nothing: no rank waits for this one, because only rank 0 serves the queue."""
