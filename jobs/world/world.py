"""The world of a rank: its device, its process group, and the few small collectives that training needs.

A single rank that synchronizes nothing needs no process group; `group` is then None.
"""

import os
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout

from muster.jobs.basics.errors import RefusedError, StartTimeoutError
from muster.jobs.basics.words import spell_ranks
from muster.jobs.hosts.ranks import RankEnv

# A collective may wait for a rank that loads data or writes a checkpoint. A dead peer is noticed at once as a lost
# connection, so this limit is only for hangs. The value is torch's default for gloo.
COLLECTIVE_TIMEOUT_S: Final = 1800.0
GLOO_INTERFACES: Final = "GLOO_SOCKET_IFNAME"
T = TypeVar("T")
GLOO_KEY: Final = re.compile(r"wait timeout after .*/(\d+)\s*$")  # gloo waits for the store key ".../<own rank>/<peer>"


@dataclass(frozen=True)
class World:
    """One rank among `size`, their process group, and the device of this rank.

    `pipe` x `tensor` ranks share one copy of the model and read the same part of a batch. Ranks are numbered as in
    `pipe.mesh`: tensor ranks are adjacent, ranks of one pipeline are furthest apart.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    device: torch.device
    pipe: int = 1
    tensor: int = 1
    check: Callable[[], None] | None = None  # raises if values that other ranks have sent may be wrong

    @property
    def data_ranks(self) -> int:
        """The number of parts of a batch."""
        return self.size // (self.pipe * self.tensor)

    @property
    def data_rank(self) -> int:
        """The index of this rank's part of a batch."""
        return self.rank // self.tensor % self.data_ranks

    @property
    def pipe_rank(self) -> int:
        """The position of this rank in its pipeline."""
        return self.rank // (self.data_ranks * self.tensor)

    @property
    def tensor_rank(self) -> int:
        """The index of this rank's part of each layer."""
        return self.rank % self.tensor

    def rank_at(self, pipe_rank: int) -> int:
        """Return the rank at a position of this rank's pipeline."""
        return (pipe_rank * self.data_ranks + self.data_rank) * self.tensor + self.tensor_rank

    def readers(self, gathered: Sequence[T]) -> Sequence[T]:
        """Select one value per part of a batch from the values of all ranks, which agree if they read the same part."""
        return gathered[: self.data_ranks * self.tensor : self.tensor]

    def meet(self) -> None:
        """Wait until every rank has called this: a collective."""
        self.gather(torch.zeros(1, device=self.device))

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order. All must have the same shape."""
        if self.group is None:
            return [mine]
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine, group=self.group)
        if self.check is not None:
            self.check()
        return gathered


@dataclass(frozen=True)
class Peer:
    """The host of a rank and the CUDA devices it sees. Ranks whose `Peer` is equal share these devices.

    `held`: the index of the device that the rank has used so far, in an attempt that continues in place.
    """

    host: str
    visible: str | None  # CUDA_VISIBLE_DEVICES
    devices: int
    held: int | None = field(default=None, compare=False)


def this_peer(held: int | None = None) -> Peer:
    """Return the Peer of this process."""
    return Peer(socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count(), held)


def choose_device(wanted: str, rank: int, peers: Sequence[Peer], *, key: str = "train.device") -> torch.device:
    """Return the device of a rank: CUDA if asked for, or if every rank can have a GPU. Pure; the same on all ranks.

    `key` is the name of the setting, for the message.

    Raises:
        RefusedError: if CUDA was asked for and some ranks have no GPU, or if only some ranks have one.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    devices = [_device_index(each, peers) for each in range(len(peers))]
    without = [each for each, index in enumerate(devices) if index is None]
    if without and (wanted == "cuda" or len(without) < len(peers)):
        peer = peers[without[0]]
        raise RefusedError(
            f"{key}: {wanted}: {spell_ranks(without[:8])} of {len(peers)} cannot have a CUDA device of their "
            f"own ({peer.host} has {peer.devices}); set device: cpu, or fewer ranks_per_node"
        )
    index = devices[rank]
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def _device_index(rank: int, peers: Sequence[Peer]) -> int | None:
    peer = peers[rank]
    sharing = [each for each, other in enumerate(peers) if other == peer]
    if peer.devices >= len(sharing):
        if peer.held is not None:
            return peer.held
        taken = {peers[each].held for each in sharing}
        free = [index for index in range(peer.devices) if index not in taken]
        return free[[each for each in sharing if peers[each].held is None].index(rank)]
    # CUDA_VISIBLE_DEVICES shows one device, so something (perhaps Slurm's cgroups) assigned one to each rank.
    return 0 if peer.devices == 1 and peer.visible else None


def open_world(store: Store, env: RankEnv, device: torch.device, timeout_s: float) -> World:
    """Create the process group on a store where all ranks have met.

    Raises:
        RefusedError: if the environment names a network interface that this machine does not have.
        StartTimeoutError: if a rank that had arrived did not join in time.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        check_interfaces(os.environ.get(GLOO_INTERFACES, ""))
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=env.rank,
            world_size=env.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except dist.DistStoreError as error:
        waited = GLOO_KEY.search(str(error))
        whom = f"rank {waited[1]} had arrived but" if waited else "a rank that had arrived"
        raise StartTimeoutError(
            f"{whom} did not join the process group within {timeout_s:g} s (rank {env.rank} waited); "
            "see its output, or raise start_timeout_s"
        ) from error
    group = dist.group.WORLD
    assert group is not None
    _set_pg_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S), group)
    return World(env.rank, env.world_size, group, device)


def check_interfaces(named: str) -> None:
    """Check the interfaces named in GLOO_SOCKET_IFNAME, separated by commas.

    Raises:
        RefusedError: if this machine lacks one of them. gloo's own error would be a C++ stack.
    """
    here = [name for _, name in socket.if_nameindex()]
    if wrong := [name for name in named.split(",") if name and name not in here]:
        raise RefusedError(
            f"environment: {GLOO_INTERFACES}={named}: {socket.gethostname()} has no interface {wrong[0]!r}; "
            f"unset it, or name one of {', '.join(here)}"
        )


def require_equal(world: World, what: str, digest: str, hint: str) -> None:
    """Check that a SHA-256 (hex) is the same on all ranks.

    Raises:
        RefusedError: on every rank, naming the ranks that differ from rank 0.
    """
    mine = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8, device=world.device)  # (32,)
    theirs = [bytes(each.tolist()) for each in world.gather(mine)]
    if differing := [rank for rank, each in enumerate(theirs) if each != theirs[0]]:
        raise RefusedError(f"{what} of {spell_ranks(differing)} differs from rank 0's; {hint}")


def add_in_order(values: Iterable[float]) -> float:
    """Add values from first to last. The built-in `sum` rounds differently from Python 3.12 on (compensated sums)."""
    total = 0.0
    for value in values:
        total += value
    return total
