"""A parameter server: the thread-safe owner of one shard, which applies gradients in the order of their arrival.

    worker 1   ── gradient ──→ │                       │ ── shard, version 7 ──→
    worker 2   ── gradient ──→ │ one at a time: step,  │ ── shard, version 8 ──→
    own worker ── gradient ──→ │ version + 1           │ ── shard, version 9 ──→

One thread per remote worker waits for its requests, so a slow or lost worker delays no other worker.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock, Thread
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from muster.ddp.asynchronous.links import TAG, Link

PUSH: Final = 1.0  # request, followed by a gradient; the reply is the updated shard
PULL: Final = 2.0  # request; the reply is the shard
LEAVE: Final = 3.0  # the last request of a worker; there is no reply


class ParameterServer:
    """Serve a shard to the workers of `links` until all of them have left or are lost.

    Requests arrive over `group`, a gloo group. `room` is an empty tensor like those that the links carry. `optimizer`
    steps `shard`, a flat tensor on any device. The server replaces its `.grad`. The *staleness* of a gradient is the
    number of updates that the shard has received since the worker pulled the values for which it was computed.
    """

    def __init__(
        self,
        shard: Tensor,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        links: Mapping[int, Link],
        room: Tensor,
    ) -> None:
        self.shard = shard
        self.optimizer = optimizer
        self.group = group
        self.version = 0  # number of updates
        self.lost: list[int] = []  # workers whose connections have closed, in the order of closing
        self._pulled: dict[int, int] = {}  # the version that each worker pulled last
        self._failure: Exception | None = None
        self._lock = Lock()
        self._stream = torch.cuda.Stream(shard.device) if shard.is_cuda else None  # type: ignore[no-untyped-call]
        shard.grad = torch.zeros_like(shard)
        if shard.is_cuda:  # the stream must not start before the shard and its state are written
            torch.cuda.synchronize(shard.device)
        self._threads = [
            Thread(
                target=self._serve, args=(each, link, torch.empty_like(room, pin_memory=room.is_pinned())), daemon=True
            )
            for each, link in links.items()
        ]
        for thread in self._threads:
            thread.start()

    def push(self, worker: int, gradient: Tensor, lr: float, into: Tensor) -> int:
        """Apply a worker's gradient, copy the shard into `into`, and return the gradient's staleness.

        Both tensors have the shard's shape.

        Raises:
            RuntimeError: if an earlier update failed.
        """
        with self._lock, self._beside():
            self._check()
            staleness = self.version - self._pulled.get(worker, 0)
            assert self.shard.grad is not None
            self.shard.grad.copy_(gradient)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            try:
                self.optimizer.step()
            except Exception as error:
                self._failure = error
                raise
            self.version += 1
            self._copy(worker, into)
            return staleness

    def pull(self, worker: int, into: Tensor) -> None:
        """Copy the shard into `into`."""
        with self._lock, self._beside():
            self._check()
            self._copy(worker, into)

    def join(self) -> None:
        """Wait until every remote worker has left or is lost.

        Raises:
            RuntimeError: if an update failed.
        """
        for thread in self._threads:
            thread.join()
        self._check()

    def _copy(self, worker: int, into: Tensor) -> None:
        into.copy_(self.shard.detach())
        if self._stream is not None:
            self._stream.synchronize()
        self._pulled[worker] = self.version

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"a parameter server's update failed: {self._failure}") from self._failure

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Work on a stream of its own, which waits for the caller's stream but not for kernels launched later."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.shard.device))
        with torch.cuda.stream(self._stream):
            yield

    def _serve(self, worker: int, link: Link, room: Tensor) -> None:
        try:
            if self._stream is None:
                self._answer(worker, link, room)
                return
            torch.cuda.set_device(self.shard.device)  # the device of this thread
            with torch.cuda.stream(torch.cuda.Stream(self.shard.device)):  # type: ignore[no-untyped-call]
                self._answer(worker, link, room)
        except RuntimeError:  # gloo raises this when the connection is closed
            self.lost.append(worker)
        finally:
            link.close()

    def _answer(self, worker: int, link: Link, room: Tensor) -> None:
        request = torch.empty(2, dtype=torch.float64)  # [PUSH, PULL or LEAVE; learning rate]
        reply = torch.zeros(2, dtype=torch.float64)  # [staleness, unused]
        while True:
            dist.recv(request, group=self.group, group_src=worker, tag=TAG)
            what, lr = request.tolist()
            if what == LEAVE:
                return
            if what == PUSH:
                link.pushed(room)
                reply[0] = self.push(worker, room, lr, room)
            else:
                self.pull(worker, room)
            dist.send(reply, group=self.group, group_dst=worker, tag=TAG + 1)
            link.reply(room)
