"""The ranks of a benchmark. They meet and agree on backend and devices before anything is measured.

No code here runs a torch operation or initializes CUDA, because the process forks later.
"""

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from muster.collectives_bench.ranks import facts
from muster.collectives_bench.records import HostFacts, WorldRecord
from muster.collectives_bench.settings import BenchSettings
from muster.jobs.basics.errors import RefusedError, StartTimeoutError
from muster.jobs.basics.reading import parse_json
from muster.jobs.basics.words import spell_ranks
from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.machine import linux, procfs
from muster.jobs.node.store import serve
from muster.jobs.world.meeting import connect, listen, meet
from muster.jobs.world.world import GLOO_INTERFACES, Peer, check_interfaces, choose_device

PREFIX: Final = "bench"
ASK_AGAIN_S: Final = 0.01
NETWORK: Final = Path("/proc/self/ns/net")


@dataclass(frozen=True)
class RankHost:
    """The place of a rank.

    Ranks with equal `machine` share cores and memory. Ranks with equal `network` share interfaces.
    """

    host: str
    machine: str
    network: str
    settings: str  # SHA-256 of the settings, which must be the same on all ranks


@dataclass(frozen=True)
class BenchRanks:
    """The ranks of the benchmark, as seen by one rank. Only this object uses `store`."""

    env: RankEnv
    store: Store
    rank_hosts: list[RankHost]
    hosts: list[HostFacts]
    world: WorldRecord
    device: torch.device

    @property
    def prefix(self) -> str:
        """The full key prefix of `store`. Processes that open a new connection with `connect` need it."""
        return f"muster/attempt-{self.env.attempt}/{PREFIX}"

    def companions(self, rank: int) -> list[int]:
        """List the ranks that share a machine's cores and memory with `rank`, including itself."""
        return [
            each for each, rank_host in enumerate(self.rank_hosts) if rank_host.machine == self.rank_hosts[rank].machine
        ]

    def counts_the_wire(self, rank: int) -> bool:
        """Return True for the one rank of each network namespace that reads the counters of the interfaces."""
        return [rank_host.network for rank_host in self.rank_hosts].index(self.rank_hosts[rank].network) == rank

    # Messages between launch managers -------------------------------------------------------------------------------

    def say(self, key: str, value: Any) -> None:
        """Publish a value for all ranks. Raises the errors of `hear`."""
        with self._dialling():
            self.store.set(key, json.dumps(value))

    def has_been_said(self, key: str) -> bool:
        """Return True if a value has been published. This asks the store once. Raises the errors of `hear`."""
        with self._dialling():
            found: bool = self.store.check([key])
        return found

    def hear(self, key: str, timeout_s: float) -> Any:
        """Wait for a published value and return it.

        Raises:
            StartTimeoutError: if no value arrives in time, or the store is gone.
        """
        whom = f"rank {rank}" if (rank := key.rpartition("/")[2]).isdecimal() else "rank 0"
        with self._dialling(whom):
            self.store.wait([key], timedelta(seconds=timeout_s))
            return parse_json(self.store.get(key))

    def comes(self, key: str, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for a value; return True if it has been published. Raises the errors of
        `has_been_said`.

        This polls, because the store's own wait blocks signals and prints to standard error when it times out.
        """
        deadline = time.monotonic() + timeout_s
        while not (found := self.has_been_said(key)) and time.monotonic() < deadline:
            time.sleep(ASK_AGAIN_S)
        return found

    @contextmanager
    def _dialling(self, whom: str = "another rank") -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            raise StartTimeoutError(
                f"rank {self.env.rank}: the store at {self.env.master_addr}:{self.env.master_port} is gone, because "
                "its process ended; see the output of rank 0"
            ) from error
        except dist.DistStoreError as error:
            raise StartTimeoutError(
                f"rank {self.env.rank} waited in vain for {whom}: its process is gone, or hangs; see its output"
            ) from error

    def hear_all(self, key: str, timeout_s: float) -> list[Any]:
        """Wait for the values that all ranks publish under KEY/RANK. Raises the errors of `hear`."""
        deadline = time.monotonic() + timeout_s
        ranks = range(self.env.world_size)
        return [self.hear(f"{key}/{rank}", max(deadline - time.monotonic(), 0.001)) for rank in ranks]

    def part(self, timeout_s: float) -> None:
        """Leave. The rank that serves the store waits at most `timeout_s` until all other ranks have left."""
        self.say(f"parted/{self.env.rank}", "")
        if self.env.rank == 0:
            with suppress(StartTimeoutError):  # another rank died after its last message
                self.hear_all("parted", timeout_s)


def check_torch(settings: BenchSettings) -> None:
    """Refuse a backend or a device that this build of torch lacks.

    Raises:
        RefusedError: if torch lacks it. The message names the missing part.
    """
    if settings.backend == "nccl" and not dist.is_nccl_available():
        raise RefusedError(
            f"bench.backend: nccl: this torch ({torch.__version__}) is built without NCCL; install a build for CUDA, "
            "or set backend: gloo"
        )
    if not dist.is_gloo_available():
        raise RefusedError(f"bench.backend: this torch ({torch.__version__}) is built without gloo; install another")
    if settings.device == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        raise RefusedError(
            f"bench.device: cuda: this torch ({torch.__version__}) is built for CPUs only; install a build for CUDA, "
            "or set device: cpu"
        )


def assemble(env: RankEnv, settings: BenchSettings, timeout_s: float, arrived: Callable[[], None]) -> BenchRanks:
    """Meet the other ranks, and agree on backend and devices.

    Raises:
        RefusedError: if the backend, the devices or the settings do not fit together.
        StartTimeoutError: if a rank did not arrive in time.
    """
    check_torch(settings)
    if settings.pairs and env.nodes < 2:
        raise RefusedError(f"bench.pairs: needs 2 nodes or more, but this job has {env.nodes}; set nodes: 2")
    check_interfaces(os.environ.get(GLOO_INTERFACES, ""))
    if not env.agent_store and env.rank == 0:
        env = replace(env, agent_store=True)
        host_store(env)
    arrived()
    attempt = connect(env, timeout_s)
    peers = meet(attempt, env, timeout_s)
    store = PrefixStore(PREFIX, attempt)
    device = device_of(settings, env.rank, peers)
    world = WorldRecord(
        nodes=env.nodes,
        ranks_per_node=env.local_world_size,
        ranks=env.world_size,
        backend="nccl" if device.type == "cuda" and settings.backend != "gloo" else "gloo",
        device="cuda" if device.type == "cuda" else "cpu",
    )
    cores = sorted(os.sched_getaffinity(0))
    mine: dict[str, Any] = {
        "rank_host": asdict(rank_host_of(settings)),
        "node": env.node_rank,
        "cores": cores,
        "host": None,
    }
    if env.local_rank == 0:
        mine["host"] = facts.host_facts(env, os.environ, backend=world.backend).model_dump(mode="json")
    bench_ranks = BenchRanks(env, store, [], [], world, device)
    bench_ranks.say(f"rank_host/{env.rank}", mine)
    said = bench_ranks.hear_all("rank_host", timeout_s)
    rank_hosts = [RankHost(**each["rank_host"]) for each in said]
    if differing := [rank for rank, rank_host in enumerate(rank_hosts) if rank_host.settings != rank_hosts[0].settings]:
        raise RefusedError(f"bench: settings of {spell_ranks(differing)} differ from rank 0's; pass the same to all")
    return replace(bench_ranks, rank_hosts=rank_hosts, hosts=hosts_of(said))


def hosts_of(said: Sequence[Mapping[str, Any]]) -> list[HostFacts]:
    """Return the hosts' facts from all ranks' messages.

    The cores of a host's ranks are merged, because a pinned rank knows only its own cores.
    """
    cores: dict[int, set[int]] = {}
    for each in said:
        cores.setdefault(each["node"], set()).update(each["cores"])
    hosts = [HostFacts.model_validate(each["host"]) for each in said if each["host"] is not None]
    return [host.model_copy(update={"cores": len(cores[host.node])}) for host in hosts]


def rank_host_of(settings: BenchSettings) -> RankHost:
    """Describe the place of this process."""
    try:
        machine = procfs.boot_id()
    except OSError:  # the kernel hides the file
        machine = socket.gethostname()
    digest = hashlib.sha256(settings.model_dump_json().encode()).hexdigest()
    return RankHost(socket.gethostname(), machine, f"{machine}/{NETWORK.readlink()}", digest)


def device_of(settings: BenchSettings, rank: int, peers: list[Peer]) -> torch.device:
    """Choose a rank's device: its own GPU if GPUs are requested or every rank can have one, else the CPU.

    Raises:
        RefusedError: if GPUs are requested, and some rank cannot have its own GPU.
    """
    asked = settings.device == "cuda" or settings.backend == "nccl"
    if settings.device == "cpu" or (settings.backend == "gloo" and not asked):
        return torch.device("cpu")
    try:
        return choose_device("cuda", rank, peers, key="bench.device")
    except RefusedError:
        if asked:
            raise
        return torch.device("cpu")


def host_store(env: RankEnv) -> None:
    """Serve the store for ranks without an agent, in a process that ends when this process ends.

    The process is separate, because a server's threads would make every later fork of this process unsafe.

    Raises:
        RefusedError: if the port is taken.
    """
    listening = listen(env)
    parent = os.getpid()
    if os.fork() == 0:
        linux.die_with_parent(parent)
        serve(listening)
        os._exit(0)
    listening.close()
