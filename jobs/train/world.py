"""This rank's world: its device, how it meets the others, and the few small exchanges that training needs.

A world of one rank that synchronizes nothing needs no process group; `group` is then None.
"""

import json
import os
import re
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout

from jobs.errors import RefusedError, StartTimeoutError
from jobs.ranks import RankEnv

# A collective may wait for a rank that loads data or writes a checkpoint; a dead peer shows at once as a lost
# connection, so this bound is for what hangs without dying. Torch's own default for gloo.
COLLECTIVE_TIMEOUT_S: Final = 1800.0
GLOO_KEY: Final = re.compile(r"wait timeout after .*/(\d+)\s*$")  # gloo asks the store for ".../<own rank>/<peer>"


@dataclass(frozen=True)
class World:
    """One rank among `size`, the group they talk in, and the device this rank computes on."""

    rank: int
    size: int
    group: dist.ProcessGroup | None
    device: torch.device

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order; all must have one shape."""
        if self.group is None:
            return [mine]
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine, group=self.group)
        return gathered


@dataclass(frozen=True)
class Peer:
    """Where a rank is and which CUDA devices it sees: ranks that are equal in this share those devices."""

    host: str
    visible: str | None  # CUDA_VISIBLE_DEVICES
    devices: int


def this_peer() -> Peer:
    """Describe this process."""
    return Peer(socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count())


def choose_device(wanted: str, rank: int, peers: Sequence[Peer]) -> torch.device:
    """Return the device of a rank: CUDA when asked for, or when every rank can have one. Pure, the same on all ranks.

    Raises:
        RefusedError: CUDA was asked for, or chosen by some ranks, and others have none.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    devices = [_device_index(each, peers) for each in range(len(peers))]
    without = [each for each, index in enumerate(devices) if index is None]
    if without and (wanted == "cuda" or len(without) < len(peers)):
        peer = peers[without[0]]
        raise RefusedError(
            f"train.device: {wanted}: {_ranks(without[:8])} of {len(peers)} cannot have a CUDA device of their own "
            f"({peer.host} has {peer.devices}); set device: cpu, or fewer ranks_per_node"
        )
    index = devices[rank]
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def _device_index(rank: int, peers: Sequence[Peer]) -> int | None:
    peer = peers[rank]
    sharing = [each for each, other in enumerate(peers) if other == peer]
    if peer.devices >= len(sharing):
        return sharing.index(rank)
    # One device and a name for it: somebody, a cgroup of Slurm's perhaps, bound another one to each rank.
    return 0 if peer.devices == 1 and peer.visible else None


def connect(env: RankEnv, timeout_s: float) -> Store:
    """Reach the store of the attempt; rank 0 serves it unless an agent does.

    Raises:
        RefusedError: the master port is taken.
        StartTimeoutError: nothing answered at the master address in time.
    """
    prefix = f"muster/attempt-{env.attempt}"  # torchrun's store outlives its restarts, and holds keys of its own
    if env.world_size == 1 and not env.agent_store:
        return PrefixStore(prefix, HashStore())
    serves = env.rank == 0 and not env.agent_store
    where = f"{env.master_addr}:{env.master_port}"
    try:
        store = TCPStore(
            env.master_addr,
            env.master_port,
            env.world_size,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
        if serves:
            raise RefusedError(
                f"{where}: rank 0 cannot serve the store here: {_first_line(error)}; choose another --master-port"
            ) from error
        raise StartTimeoutError(
            f"{where}: rank {env.rank} found no master within {timeout_s:g} s; start rank 0, or check the address "
            "and the port"
        ) from error
    return PrefixStore(prefix, store)


def meet(store: Store, env: RankEnv, timeout_s: float) -> list[Peer]:
    """Wait until every rank has arrived; return them in rank order.

    Raises:
        StartTimeoutError: names the ranks that did not.
    """
    arrivals = PrefixStore("arrived", store)
    arrivals.set(str(env.rank), json.dumps(asdict(this_peer())))
    deadline = time.monotonic() + timeout_s
    for rank in range(env.world_size):
        remaining_s = max(deadline - time.monotonic(), 0.001)
        try:
            arrivals.wait([str(rank)], timedelta(seconds=remaining_s))
        except dist.DistStoreError as error:
            missing = [each for each in range(env.world_size) if not arrivals.check([str(each)])]
            if missing:
                raise StartTimeoutError(
                    f"{_ranks(missing)} of {env.world_size} did not arrive at {env.master_addr}:{env.master_port} "
                    f"within {timeout_s:g} s; look at their output, or raise start_timeout_s"
                ) from error
    return [Peer(**json.loads(arrivals.get(str(rank)))) for rank in range(env.world_size)]


def open_world(store: Store, env: RankEnv, device: torch.device, timeout_s: float) -> World:
    """Make the process group on a store where all ranks have met.

    Raises:
        StartTimeoutError: a rank that had arrived did not join in time.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
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
            "look at its output, or raise start_timeout_s"
        ) from error
    group = dist.group.WORLD
    assert group is not None
    _set_pg_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S), group)
    return World(env.rank, env.world_size, group, device)


def require_equal(world: World, what: str, digest: str, hint: str) -> None:
    """Compare a sha256 (hex) over the ranks.

    Raises:
        RefusedError: on every rank, naming the ranks that differ from rank 0.
    """
    mine = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8, device=world.device)  # (32,)
    theirs = [bytes(each.tolist()) for each in world.gather(mine)]
    if differing := [rank for rank, each in enumerate(theirs) if each != theirs[0]]:
        raise RefusedError(f"{what} of {_ranks(differing)} differs from rank 0's; {hint}")


def add_in_order(values: Iterable[float]) -> float:
    """Add first to last; `sum` compensates from Python 3.12 on, so its bits depend on the version."""
    total = 0.0
    for value in values:
        total += value
    return total


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
