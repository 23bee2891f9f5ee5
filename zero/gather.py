"""Gather the ranks' shards into whole parameters. Each class starts a flat tensor and returns a wait.

    LinkGather        GPUs: the backend's all-gather; CPUs on several hosts: a ring, within 6 % of the link rate
    BroadcastGather   CPUs of one host: a broadcast of each shard, by gloo's threads
    NeighbourGather   CPUs of one host with shared memory: copies

All give the same bits. Between hosts, simultaneous broadcasts with gloo take 2.3 times as long as a ring. Within one
host they send nothing twice over a link, and need a third less CPU time than the messages of our ring.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from muster.ddp.checks import gather_json
from muster.ddp.collective_log import LOG
from muster.ddp.means import Background, Group, Wait
from muster.ddp.primitives import all_gather, ring_all_gather
from muster.zero.flat import FlatParameters
from muster.zero.neighbours import Neighbours, at_once, once


class Gather(ABC):
    """A way to gather whole tensors."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)

    def written(self) -> None:  # noqa: B027 - for most, `start` implies it
        """Note that this rank has written its shards, before any is gathered."""

    def meet(self) -> None:  # noqa: B027 - with messages, ranks are synchronized as far as necessary
        """Wait until no rank reads shards that this rank may write to next. A collective."""

    def started(self) -> None:  # noqa: B027 - for most, waiting implies it
        """Note that gathers of all written shards have been started, if shards are parts of the parameters."""

    @abstractmethod
    def start(self, home: FlatParameters, shard: Tensor, out: Tensor) -> Wait:
        """Fill `out`, which has the flat tensor's length, with the ranks' shards. Waiting twice is harmless."""


class LinkGather(Gather):
    """The backend's all-gather on a GPU, a ring on CPUs; runs in the background."""

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group)
        self._background = Background(group, device)

    def start(self, home: FlatParameters, shard: Tensor, out: Tensor) -> Wait:
        if out.is_cuda:
            return self._background.start(lambda: all_gather(out, shard, group=self.group), "all_gather", out.nbytes)
        parts = home.parts(out)
        return self._background.start(lambda: ring_all_gather(shard, parts, self.group), "all_gather", out.nbytes)


class BroadcastGather(Gather):
    """A broadcast of each rank's shard, all at the same time."""

    def start(self, home: FlatParameters, shard: Tensor, out: Tensor) -> Wait:
        parts = home.parts(out)
        own = parts[home.rank]
        finished = LOG.open("all_gather by broadcasts", out.nbytes)
        works = [
            dist.broadcast(shard if part is own else part, group=self.group, group_src=rank, async_op=True)
            for rank, part in enumerate(parts)
        ]
        LOG.call_after(works, finished)
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)

        def wait() -> None:
            while works:
                works.pop(0).wait()

        return wait


class NeighbourGather(Gather):
    """Copy the other ranks' shards from shared memory.

    A barrier after writing shards precedes all reads. No barrier is needed before a step writes again: a shard is
    stepped after its gradients have been scattered, and every rank takes part in that only when it has finished with
    the shard. If a shard is part of the parameters, which the user may write to at any time, all ranks copy at once and
    then meet again.
    """

    def __init__(self, group: Group, neighbours: Neighbours) -> None:
        super().__init__(group)
        self._neighbours = neighbours
        self._shards: dict[int, Sequence[Tensor]] = {}  # by id of a flat tensor: the shards of all ranks
        self._others = BroadcastGather(group)
        self._written: Wait = at_once
        self._read: Wait = at_once

    def know(self, home: FlatParameters, shards: Sequence[Tensor]) -> None:
        """Register where the ranks have their shards."""
        self._shards[id(home)] = shards

    def meet(self) -> None:
        """Wait until all ranks have finished with the shards."""
        self._neighbours.meeting()()

    def written(self) -> None:
        """Begin a barrier, which is waited for before shards are read."""
        self._written = self._neighbours.meeting()

    def started(self) -> None:
        """Begin a barrier for the ranks that have copied everything they started."""
        self._read = self._neighbours.meeting()

    def start(self, home: FlatParameters, shard: Tensor, out: Tensor) -> Wait:
        """Copy now or in the wait. Tensors other than shards of parameters are broadcast."""
        shards = self._shards.get(id(home))
        if shards is None or shard is not home.shard:
            return self._others.start(home, shard, out)
        copied = once(lambda: self._copy(home, shards, out))
        if home.is_split:
            return copied
        with suppress(RuntimeError):  # if a rank does not come, the wait tries again and reports what it waits for
            copied()

        def wait() -> None:
            copied()
            self._read()

        return wait

    def _copy(self, home: FlatParameters, shards: Sequence[Tensor], out: Tensor) -> None:
        finished = LOG.open("all_gather in shared memory", out.nbytes)
        self._written()
        for part, theirs in zip(home.parts(out), shards, strict=True):
            if part.data_ptr() != theirs.data_ptr():
                part.copy_(theirs)
        finished()


def gather_for(group: Group, device: torch.device, neighbours: Neighbours | None = None) -> Gather:
    """Choose a gather by device and placement of the ranks, never by measured speed. A collective."""
    if neighbours is not None:
        return NeighbourGather(group, neighbours)
    if device.type != "cuda" and on_one_host(group):
        return BroadcastGather(group)
    return LinkGather(group, device)


def on_one_host(group: Group) -> bool:
    """Return whether all ranks share one kernel's loopback: the same boot and the same network namespace."""
    place = [
        Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"),
        Path("/proc/self/ns/net").stat().st_ino,
    ]
    places = gather_json(place, group, torch.device("cpu")).values()
    return all(each == place for each in places)
