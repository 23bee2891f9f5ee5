"""Gather the ranks' shards into whole parameters. Each class starts a gather and returns a function that waits for it.

    LinkGather        GPUs: the backend's all-gather; CPUs on several hosts: a ring, within 6 % of the link rate
    BroadcastGather   CPUs of one host: a broadcast of each shard, by gloo's threads
    SharedMemoryGather   CPUs of one host with shared memory: copies

All of them produce the same bits. Between hosts, simultaneous broadcasts with gloo take 2.3 times as long as a ring.
Within one host no network link limits broadcasts, and they need a third less CPU time than the messages of Muster's
ring.
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
from muster.zero.shared_memory import SharedMemoryPeers, at_once, once


class Gather(ABC):
    """A method of gathering whole tensors."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)

    def written(self) -> None:  # noqa: B027 - only shared memory needs it
        """Record that this rank has written its shards. This must be called before the shards are gathered."""

    def meet(self) -> None:  # noqa: B027 - only shared memory needs it: messages synchronize ranks
        """Wait until no rank reads the shards to which this rank may write next. A collective."""

    def started(self) -> None:  # noqa: B027 - only shared memory needs it
        """Record that the gathers of all shards have been started, if the shards are parts of the parameters."""

    @abstractmethod
    def start(self, flat_parameter: FlatParameters, shard: Tensor, out: Tensor) -> Wait:
        """Begin to fill `out`, which has the flat tensor's length, with the ranks' shards.

        The returned function may be called twice.
        """


class LinkGather(Gather):
    """An all-gather in the background: the backend's on a GPU, a ring on CPUs."""

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group)
        self._background = Background(group, device)

    def start(self, flat_parameter: FlatParameters, shard: Tensor, out: Tensor) -> Wait:
        if out.is_cuda:
            return self._background.start(lambda: all_gather(out, shard, group=self.group), "all_gather", out.nbytes)
        parts = flat_parameter.parts(out)
        return self._background.start(lambda: ring_all_gather(shard, parts, self.group), "all_gather", out.nbytes)


class BroadcastGather(Gather):
    """Simultaneous broadcasts, one of each rank's shard."""

    def start(self, flat_parameter: FlatParameters, shard: Tensor, out: Tensor) -> Wait:
        parts = flat_parameter.parts(out)
        own = parts[flat_parameter.rank]
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


class SharedMemoryGather(Gather):
    """A gather by copies of the other ranks' shards, which are in shared memory.

    A barrier separates writing shards from reading them. No barrier is needed before the next step writes: a step needs
    scattered gradients, and a rank contributes its gradients only after it has finished reading the shards. In stages 1
    and 2, shards are parts of the parameters, which the user may write to at any time. So all ranks copy at once, and a
    second barrier follows.
    """

    def __init__(self, group: Group, peers: SharedMemoryPeers) -> None:
        super().__init__(group)
        self._peers = peers
        self._shards: dict[int, Sequence[Tensor]] = {}  # the shards of all ranks, by id of their flat tensor
        self._others = BroadcastGather(group)
        self._written: Wait = at_once
        self._read: Wait = at_once

    def know(self, flat_parameter: FlatParameters, shards: Sequence[Tensor]) -> None:
        """Register the shards of all ranks for a flat tensor."""
        self._shards[id(flat_parameter)] = shards

    def meet(self) -> None:
        """Wait until all ranks have finished reading the shards."""
        self._peers.meeting()()

    def written(self) -> None:
        """Begin the barrier that precedes all reads of the shards."""
        self._written = self._peers.meeting()

    def started(self) -> None:
        """Begin a barrier, which ends when all ranks have copied all shards."""
        self._read = self._peers.meeting()

    def start(self, flat_parameter: FlatParameters, shard: Tensor, out: Tensor) -> Wait:
        """Copy the shards: in stage 3 during the wait, in stages 1 and 2 at once.

        Tensors that are not in shared memory are broadcast.
        """
        shards = self._shards.get(id(flat_parameter))
        if shards is None or shard is not flat_parameter.shard:
            return self._others.start(flat_parameter, shard, out)
        copied = once(lambda: self._copy(flat_parameter, shards, out))
        if flat_parameter.is_split:
            return copied
        with suppress(RuntimeError):  # if the barrier times out, the wait runs it again and explains the error
            copied()

        def wait() -> None:
            copied()
            self._read()

        return wait

    def _copy(self, flat_parameter: FlatParameters, shards: Sequence[Tensor], out: Tensor) -> None:
        finished = LOG.open("all_gather in shared memory", out.nbytes)
        self._written()
        for part, theirs in zip(flat_parameter.parts(out), shards, strict=True):
            if part.data_ptr() != theirs.data_ptr():
                part.copy_(theirs)
        finished()


def gather_for(group: Group, device: torch.device, peers: SharedMemoryPeers | None = None) -> Gather:
    """Choose a gather class by device and by placement of the ranks, never by measured speed. A collective."""
    if peers is not None:
        return SharedMemoryGather(group, peers)
    if device.type != "cuda" and on_one_host(group):
        return BroadcastGather(group)
    return LinkGather(group, device)


def on_one_host(group: Group) -> bool:
    """Return whether all ranks share one loopback interface, that is, one boot of a host and one network namespace."""
    place = [
        Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"),
        Path("/proc/self/ns/net").stat().st_ino,
    ]
    places = gather_json(place, group, torch.device("cpu")).values()
    return all(each == place for each in places)
