"""Detect the rank of this process from flags, or from the variables that torchrun, mpirun or srun set.

The sources are tried in an order that is safe for nested launchers. Explicit flags come first, then RANK and
WORLD_SIZE, which always describe this process. mpirun inside a Slurm job leaves SLURM_PROCID=0 on every rank, so MPI
comes before Slurm. Slurm's variables count only inside a step that srun created, because a batch script has
SLURM_PROCID=0 too. Without any of these the world has one rank.
"""

import ipaddress
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from muster.jobs.basics.errors import RefusedError, UsageError
from muster.jobs.basics.words import counted
from muster.jobs.hosts import ranks
from muster.jobs.hosts.launchers import (
    MPI_HINTS,
    MPI_ROWS,
    SLURM_VARIABLES,
    Found,
    read_mpi,
    read_step,
)
from muster.jobs.hosts.ranks import DEFAULT_MASTER_PORT, RankEnv, number

LOOPBACK: Final = "127.0.0.1"
LOCAL: Final = "local"

VARIABLES: Final = tuple(
    dict.fromkeys(
        (
            *ranks.VARIABLES.values(),
            *(name for row in MPI_ROWS for name in (row.rank, row.size, row.local_rank, row.local_size)),
            *MPI_HINTS,
            *SLURM_VARIABLES,
        )
    )
)


@dataclass(frozen=True)
class Flags:
    """The command-line flags that describe this rank, and the job's `ranks_per_node`. `rank` is the global rank."""

    master_ip: str | None = None
    master_port: int | None = None
    num_nodes: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    ranks_per_node: int | None = None


@dataclass(frozen=True)
class Detected:
    """The rank, its launcher (`flags`, `muster`, `torchrun`, `slurm`, ..., `local`), and the origin of each field."""

    env: RankEnv
    launcher: str
    origins: dict[str, str]


def numeric_address(name: str) -> str:
    """Resolve a host name to a numeric address, preferably IPv4.

    Raises:
        OSError: if the name is unknown.
    """
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    addresses = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return str(addresses[0][4][0])


def detect(environ: Mapping[str, str], flags: Flags, resolve: Callable[[str], str] = numeric_address) -> Detected:
    """Determine the rank of this process, its world, and the master address.

    Raises:
        UsageError: if flags are incomplete or out of range.
        RefusedError: if a launcher's variables contradict each other, or the master address is not known.
    """
    found = (
        _from_flags(flags)
        or _from_torchrun(environ)
        or read_mpi(environ)
        or read_step(environ)
        or _alone(environ, flags)
    )
    _check_range(found)
    master_addr, addr_origin = _master_addr(found, environ, flags, resolve)
    master_port, port_origin = _master_port(environ, flags)
    overridden = flags.master_ip is not None or flags.master_port is not None
    env = replace(
        found.env,
        master_addr=master_addr,
        master_port=master_port,
        # The agent's store is at the agent's address. If flags set another address, rank 0 starts a store there.
        agent_store=found.env.agent_store and not overridden,
    )
    defaults = dict.fromkeys(ranks.VARIABLES, "default")
    return Detected(
        env, found.launcher, {**defaults, **found.origins, "master_addr": addr_origin, "master_port": port_origin}
    )


def seen(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that detection examined, including those that it did not use."""
    return {name: environ[name] for name in VARIABLES if name in environ}


def _from_flags(flags: Flags) -> Found | None:
    given = {"--rank": flags.rank, "--num-nodes": flags.num_nodes}
    missing = [flag for flag, value in given.items() if value is None]
    if missing and (len(missing) < len(given) or flags.local_rank is not None):
        used = [flag for flag, value in {**given, "--local-rank": flags.local_rank}.items() if value is not None]
        raise UsageError(f"{', '.join(used)}: given without {' and '.join(missing)}; give all of them or none")
    if flags.rank is None or flags.num_nodes is None:
        return None
    ranks_per_node = 1 if flags.ranks_per_node is None else flags.ranks_per_node
    for flag, value in (("--num-nodes", flags.num_nodes), ("ranks_per_node", ranks_per_node)):
        if value < 1:
            raise UsageError(f"{flag}: must be at least 1, got {value}")
    world_size = flags.num_nodes * ranks_per_node
    if not 0 <= flags.rank < world_size:
        product = f"{counted(flags.num_nodes, 'node')} x {counted(ranks_per_node, 'rank')} per node"
        raise UsageError(f"--rank: must be 0 to {world_size - 1} ({product}), got {flags.rank}")
    local_rank = flags.rank % ranks_per_node if flags.local_rank is None else flags.local_rank
    if not 0 <= local_rank < ranks_per_node:
        raise UsageError(f"--local-rank: must be 0 to {ranks_per_node - 1}, got {local_rank}")
    node_rank = flags.rank // ranks_per_node
    env = RankEnv(flags.rank, world_size, local_rank, ranks_per_node, node_rank=node_rank, nodes=flags.num_nodes)
    origins = {
        "rank": "--rank",
        "world_size": "--num-nodes x ranks_per_node",
        "local_rank": "--rank % ranks_per_node" if flags.local_rank is None else "--local-rank",
        "local_world_size": "default" if flags.ranks_per_node is None else "ranks_per_node",
        "node_rank": "--rank // ranks_per_node",
        "nodes": "--num-nodes",
    }
    return Found("flags", env, origins)


def _from_torchrun(environ: Mapping[str, str]) -> Found | None:
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    launcher = "muster" if environ.get(ranks.RUN_ID) else "torchrun"
    origins = {field: name for field, name in ranks.VARIABLES.items() if name in environ}
    return Found(launcher, ranks.read(environ), origins)


def _alone(environ: Mapping[str, str], flags: Flags) -> Found:
    """Return a world of one rank. Raise an error if flags or variables suggest that there are more ranks."""
    if flags.master_ip is not None:
        raise UsageError("--master-ip: given without --rank and --num-nodes; give all of them or none")
    half = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if half and environ.get("WORLD_SIZE") != "1":
        raise RefusedError(
            f"environment: {half[0]}={environ[half[0]]} is set without its partner; set both RANK and WORLD_SIZE, "
            f"or unset {half[0]}"
        )
    env = RankEnv(0, 1, 0, 1, node_rank=0, nodes=1)
    return Found(LOCAL, env, {})


def _check_range(found: Found) -> None:
    env, origins = found.env, found.origins
    for what, index, count in (
        ("rank", env.rank, env.world_size),
        ("local_rank", env.local_rank, env.local_world_size),
        ("node_rank", env.node_rank, env.nodes),
    ):
        if not 0 <= index < count:
            origin = origins.get(what, what)
            raise RefusedError(
                f"environment: {origin} must be 0 to {count - 1}, got {index}; start all ranks with one launcher"
            )


def _master_addr(
    found: Found, environ: Mapping[str, str], flags: Flags, resolve: Callable[[str], str]
) -> tuple[str, str]:
    """Return the master address and its origin."""
    env = found.env
    if flags.master_ip is not None:
        return _resolved(flags.master_ip, "--master-ip", env, resolve)
    if found.launcher != LOCAL and environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"], "MASTER_ADDR"
    if env.local_world_size == env.world_size:
        return LOOPBACK, "all ranks are on this node"
    if found.first_node:
        address, origin = _resolved(found.first_node, found.first_node_origin, env, resolve)
        if env.node_rank and ipaddress.ip_address(address).is_loopback:
            raise RefusedError(
                f"environment: {origin}: resolves to {address} on this node, which is not node 0; "
                "pass --master-ip with an address of node 0 that all nodes can reach"
            )
        return address, origin
    raise RefusedError(
        f"environment: {env.world_size} ranks on {env.nodes} nodes, started by {found.launcher}, have no master "
        "address; pass --master-ip (node 0's address), or set MASTER_ADDR"
    )


def _resolved(name: str, origin: str, env: RankEnv, resolve: Callable[[str], str]) -> tuple[str, str]:
    try:
        return str(ipaddress.ip_address(name)), origin
    except ValueError:
        pass
    try:
        return resolve(name), f"{origin} ({name})"
    except OSError as error:
        reason = (error.strerror or "not known").lower()
        raise RefusedError(
            f"{origin}: rank {env.rank} cannot resolve {name!r}: {reason}; pass --master-ip with a numeric address"
        ) from error


def _master_port(environ: Mapping[str, str], flags: Flags) -> tuple[int, str]:
    if flags.master_port is not None:
        if not 1 <= flags.master_port <= 65535:
            raise UsageError(f"--master-port: must be 1 to 65535, got {flags.master_port}")
        return flags.master_port, "--master-port"
    if "MASTER_PORT" in environ:
        port = number(environ, "MASTER_PORT")
        if not 1 <= port <= 65535:
            raise RefusedError(f"environment: MASTER_PORT must be 1 to 65535, got {port}")
        return port, "MASTER_PORT"
    return DEFAULT_MASTER_PORT, "default"
