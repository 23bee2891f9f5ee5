"""How the ranks' shards become whole parameters again. Each way starts a flat tensor and returns what to wait for.

    LinkGather        GPUs: the backend's all-gather; CPUs on several hosts: a ring, within 6 % of what the links can
    BroadcastGather   CPUs of one host: a broadcast of each shard, by gloo's threads
    NeighbourGather   CPUs of one host whose ranks can read each other's memory: copies

All bring the same bits. Between hosts gloo's broadcasts at once take 2.3 times a ring's time; within one nothing is
sent twice over a link, and they need a third less of the CPU than our ring's messages.
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
    """A way to whole tensors."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)

    def written(self) -> None:  # noqa: B027 - for most a start says it
        """Hear that shards have been written, before any is gathered."""

    def meet(self) -> None:  # noqa: B027 - messages keep ranks together as far as they must be
        """Return when nobody looks at shards any more that this rank may write to next: a collective."""

    def started(self) -> None:  # noqa: B027 - for most a wait says it
        """Hear that all that has been written has been started, where shards are parts of the parameters."""

    @abstractmethod
    def start(self, home: FlatParameters, shard: Tensor, out: Tensor) -> Wait:
        """Fill `out`, as long as the whole, with the ranks' shards; waiting twice is harmless."""


class LinkGather(Gather):
    """The backend's all-gather on a GPU, a ring on CPUs; in the background."""

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group)
        self._background = Background(group, device)

    def start(self, home: FlatParameters, shard: Tensor, out: Tensor) -> Wait:
        if out.is_cuda:
            return self._background.start(lambda: all_gather(out, shard, group=self.group), "all_gather", out.nbytes)
        parts = home.parts(out)
        return self._background.start(lambda: ring_all_gather(shard, parts, self.group), "all_gather", out.nbytes)


class BroadcastGather(Gather):
    """A broadcast of each rank's shard, all at once."""

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
    """Copy the others' shards out of their memory.

    All meet when shards have been written, before anybody reads them. Nobody need wait for the others before a step
    writes again: a shard is stepped after its gradients have been scattered, to which every rank comes when it has done
    with that shard. Where a shard is a part of the parameters themselves, to which the user may write at any time, all
    copy at once and meet again.
    """

    def __init__(self, group: Group, neighbours: Neighbours) -> None:
        super().__init__(group)
        self._neighbours = neighbours
        self._shards: dict[int, Sequence[Tensor]] = {}  # of each flat tensor, by identity: those of all ranks
        self._others = BroadcastGather(group)
        self._written: Wait = at_once
        self._read: Wait = at_once

    def know(self, home: FlatParameters, shards: Sequence[Tensor]) -> None:
        """Learn where the ranks have their shards."""
        self._shards[id(home)] = shards

    def meet(self) -> None:
        """Wait for all: what they are doing with shards is done."""
        self._neighbours.meeting()()

    def written(self) -> None:
        """Come to a meeting, which is waited for before shards are read."""
        self._written = self._neighbours.meeting()

    def started(self) -> None:
        """Come to a meeting of all who have copied what they started."""
        self._read = self._neighbours.meeting()

    def start(self, home: FlatParameters, shard: Tensor, out: Tensor) -> Wait:
        """Copy, or let the wait do so. What is no shard of parameters is broadcast."""
        shards = self._shards.get(id(home))
        if shards is None or shard is not home.shard:
            return self._others.start(home, shard, out)
        copied = once(lambda: self._copy(home, shards, out))
        if home.is_split:
            return copied
        with suppress(RuntimeError):  # a rank does not come: who waits tries again, and says for what
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
    """Choose the way for a device and where the ranks are, never by how fast one is: a collective."""
    if neighbours is not None:
        return NeighbourGather(group, neighbours)
    if device.type != "cuda" and on_one_host(group):
        return BroadcastGather(group)
    return LinkGather(group, device)


def on_one_host(group: Group) -> bool:
    """True when all ranks speak over one kernel's loopback: the same boot and the same network namespace."""
    place = [
        Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"),
        Path("/proc/self/ns/net").stat().st_ino,
    ]
    places = gather_json(place, group, torch.device("cpu")).values()
    return all(each == place for each in places)
