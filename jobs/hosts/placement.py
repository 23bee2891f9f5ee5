"""Placement: assign ranks to hosts. Pure: no network, no files, no torch.

    place(job, hosts)      hosts n01 (4 slots), n02 (2 slots); ranks_per_node: slots
        node 0  n01  ranks 0-3      master: n01's address
        node 1  n02  ranks 4-5

Nodes are in the order of hosts. Each node has one block of ranks.
"""

import ipaddress
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from muster.jobs.basics.errors import RefusedError, RunFolderError
from muster.jobs.basics.hostnames import check_name, check_user
from muster.jobs.basics.words import counted
from muster.jobs.hosts.ranks import RankEnv

if TYPE_CHECKING:
    from muster.jobs.spec.job import Job  # pydantic may be missing from the Python of a user's program

VERSION: Final = 1
LOOPBACK: Final = "127.0.0.1"

T = TypeVar("T")


@dataclass(frozen=True)
class Login:
    """The ssh settings for a host whose name alone is not enough.

    Raises:
        UsageError: if `target` is not a host name, or `user` not a user name.
    """

    target: str  # ssh's argument: a name, an alias in ssh's configuration, or an address
    user: str | None = None
    port: int | None = None

    def __post_init__(self) -> None:
        check_name(self.target)
        if self.user is not None:
            check_user(self.user)


@dataclass(frozen=True)
class Host:
    """A machine that can be a node: its name, the address its peers use, and its number of slots for ranks."""

    name: str
    address: str  # numeric; "" until its agent answers
    slots: int | None = None
    login: Login | None = None  # None: ssh uses the name


@dataclass(frozen=True)
class NodePlacement:
    """One node: its host and its block of ranks."""

    node_rank: int
    host: str
    address: str
    first_rank: int
    ranks: int

    @property
    def rank_range(self) -> range:
        """The ranks of this node."""
        return range(self.first_rank, self.first_rank + self.ranks)


@dataclass(frozen=True)
class Placement:
    """All nodes of one attempt, and the master address, where their ranks meet."""

    nodes: tuple[NodePlacement, ...]
    world_size: int
    master_addr: str  # "" until node 0's agent answers

    @property
    def one_host(self) -> bool:
        """True if the ranks meet on loopback: one node, or pretend nodes on one machine."""
        return self.master_addr.startswith("127.") or self.master_addr == "::1"

    def node_of(self, rank: int) -> NodePlacement:
        """Return the node that holds a rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of {self.world_size}")
        return self.nodes[bisect_right(self.nodes, rank, key=lambda node: node.first_rank) - 1]

    def meeting_at(self, master_addr: str) -> "Placement":
        """Return a copy with the given master address."""
        return replace(self, master_addr=master_addr)

    def rank_env(
        self,
        rank: int,
        *,
        master_port: int,
        attempt: int = 0,
        run_id: str = "",
        run_dir: str = "",
        agent_store: bool = False,
    ) -> RankEnv:
        """Return the environment of one rank."""
        node = self.node_of(rank)
        return RankEnv(
            rank=rank,
            world_size=self.world_size,
            local_rank=rank - node.first_rank,
            local_world_size=node.ranks,
            node_rank=node.node_rank,
            nodes=len(self.nodes),
            master_addr=self.master_addr,
            master_port=master_port,
            attempt=attempt,
            run_id=run_id,
            run_dir=run_dir,
            agent_store=agent_store,
        )

    def to_json(self) -> dict[str, Any]:
        """Return this placement as plain JSON values."""
        return {
            "version": VERSION,
            "world_size": self.world_size,
            "master_addr": self.master_addr,
            "nodes": [asdict(node) for node in self.nodes],
        }

    @classmethod
    def from_json(cls, value: Any) -> "Placement":
        """Rebuild a placement from the result of `to_json`. The value is validated, because it may come from a file.

        Raises:
            RunFolderError: if the value has another version, or is not a placement.
        """
        if not isinstance(value, dict) or value.get("version") != VERSION:
            version = value.get("version") if isinstance(value, dict) else None
            raise RunFolderError(f"placement: found version {version!r}; this Muster reads version {VERSION}")
        try:
            nodes = tuple(_node(**node) for node in value["nodes"])
            placement = cls(nodes, value["world_size"], value["master_addr"])
        except (KeyError, TypeError, ValueError) as error:
            raise RunFolderError(f"placement: is damaged: {error}; start a new run") from error
        firsts = [sum(node.ranks for node in nodes[:index]) for index in range(len(nodes) + 1)]
        if [*(node.first_rank for node in nodes), placement.world_size] != firsts:
            raise RunFolderError(f"placement: is damaged: its nodes do not have ranks 0 to {placement.world_size} - 1")
        return placement


def _node(node_rank: int, host: str, address: str, first_rank: int, ranks: int) -> NodePlacement:
    if not all(type(number) is int for number in (node_rank, first_rank, ranks)) or ranks < 1:
        raise ValueError(f"node {node_rank!r} has {ranks!r} ranks from rank {first_rank!r}")
    return NodePlacement(node_rank, str(host), str(address), first_rank, ranks)


def place(job: "Job", hosts: Sequence[Host]) -> Placement:
    """Assign a job's ranks to the first `job.nodes` hosts, block by block.

    Raises:
        RefusedError: if there are too few hosts or slots, or other nodes cannot reach the master address.
    """
    if len(hosts) < job.nodes:
        raise RefusedError(
            f"nodes: job {job.name!r} needs {counted(job.nodes, 'host')}, got {len(hosts)}; add hosts or lower nodes"
        )
    chosen = hosts[: job.nodes]
    nodes: list[NodePlacement] = []
    first_rank = 0
    for node_rank, host in enumerate(chosen):
        ranks = _ranks_on(host, job)
        nodes.append(NodePlacement(node_rank, host.name, host.address, first_rank, ranks))
        first_rank += ranks
    return Placement(tuple(nodes), first_rank, _master(chosen))


def _ranks_on(host: Host, job: "Job") -> int:
    if job.ranks_per_node == "slots":
        if host.slots is None:
            raise RefusedError(
                f"host {host.name}: has no slots, and ranks_per_node is slots; "
                "write slots=N beside it in the hosts, or set ranks_per_node to a number"
            )
        if host.slots < 1:
            raise RefusedError(f"host {host.name}: must have at least 1 slot, got {host.slots}; exclude this host")
        return host.slots
    if host.slots is not None and host.slots < job.ranks_per_node:
        raise RefusedError(
            f"host {host.name}: must have at least {counted(job.ranks_per_node, 'slot')} for ranks_per_node, "
            f"got {host.slots}; lower ranks_per_node, or set it to slots"
        )
    return job.ranks_per_node


def _master(hosts: Sequence[Host]) -> str:
    """Return the master address, which is node 0's, or "" if only node 0's agent can determine it."""
    master = hosts[0]
    if not master.address:
        return LOOPBACK if len(hosts) == 1 else ""
    try:
        address = ipaddress.ip_address(master.address)
    except ValueError:
        if len(hosts) > 1:
            # A name may resolve differently on each node: on Debian, a node's own name is 127.0.1.1.
            raise RefusedError(
                f"host {master.name}: the address {master.address!r} is not numeric, and {len(hosts)} nodes must "
                "meet there; give a numeric address that the other nodes can reach, such as 10.10.1.1"
            ) from None
        return LOOPBACK  # with one node, the ranks connect over loopback
    others = [host for host in hosts if host.address != master.address]
    if others and (address.is_loopback or address.is_unspecified):
        raise RefusedError(
            f"host {master.name}: host {others[0].name} cannot reach the master address {master.address}; "
            "give an address that the other nodes can reach, such as 10.10.1.1"
        )
    return master.address


def divide(items: Sequence[T], parts: int) -> list[tuple[T, ...]]:
    """Divide items into contiguous parts, larger parts first. Sizes differ by at most one.

    If there are fewer items than parts, each part gets one item, assigned round robin.
    """
    count = len(items)
    if 0 < count < parts:
        return [(items[part % count],) for part in range(parts)]
    ends = [part * (count // parts) + min(part, count % parts) for part in range(parts + 1)]
    return [tuple(items[ends[part] : ends[part + 1]]) for part in range(parts)]


def pin(cores: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """Divide cores among ranks, as `divide` does. With more ranks than cores, every rank may use all cores.

    Pinning two busy ranks to one core could leave another core idle. The kernel balances ranks that are not pinned.
    """
    if ranks > len(cores):
        return [tuple(cores)] * ranks
    return divide(cores, ranks)
