"""The rendezvous of ranks: a store, served by rank 0 or an agent, in which every rank registers its arrival."""

import errno
import ipaddress
import json
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from muster.jobs.basics.errors import RefusedError, StartTimeoutError
from muster.jobs.basics.reading import parse_json
from muster.jobs.basics.words import spell_ranks
from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.world.world import Peer, this_peer

POLL_S: Final = 0.1
BACKLOG: Final = 4096  # limit for connections that wait to be accepted; the kernel may lower it
TRY_S: Final = 2.0
LEAST_S: Final = 1.0  # minimum timeout, for a master that answered just before the deadline


def connect(env: RankEnv, timeout_s: float, is_over: Callable[[], bool] | None = None) -> Store:
    """Connect to the store of the attempt. Rank 0 serves the store unless an agent does.

    `is_over`: returns whether the attempt has ended meanwhile. torch's constructor tries until its time-out, even at
    the address of a store that has ended. So with `is_over` it gets TRY_S at a time.

    Raises:
        RefusedError: if the master port is taken.
        StartTimeoutError: if nothing answered at the master address in time.
    """
    prefix = prefix_of(env)
    if env.world_size == 1 and not env.agent_store:
        return PrefixStore(prefix, HashStore())
    deadline = time.monotonic() + timeout_s
    serves = env.rank == 0 and not env.agent_store
    late = StartTimeoutError(
        f"{env.master_addr}:{env.master_port}: rank {env.rank} found no master within {timeout_s:g} s; start rank 0, "
        "or check the address and the port"
    )
    # An agent binds its port before it starts a rank. Without one, test the port first: torch's wait prints warnings.
    if not serves and not env.agent_store and not answers(env.master_addr, env.master_port, deadline):
        raise late
    listening = listen(env) if serves else None
    while True:
        left_s = max(deadline - time.monotonic(), LEAST_S)
        try:
            store = TCPStore(
                env.master_addr,
                env.master_port,
                env.world_size,
                is_master=serves,
                timeout=timedelta(seconds=min(left_s, TRY_S) if is_over else left_s),
                wait_for_workers=False,
                master_listen_fd=None if listening is None else listening.detach(),
            )
        except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
            if serves:
                raise RefusedError(
                    f"{env.master_addr}:{env.master_port}: rank 0 cannot serve the store here: {_first_line(error)}; "
                    "use an address of this machine, or another --master-port"
                ) from error
            if is_over is None or is_over() or time.monotonic() > deadline:
                raise late from error
        else:
            break
    store.set_timeout(timedelta(seconds=timeout_s))
    return PrefixStore(prefix, store)


def prefix_of(env: RankEnv) -> str:
    """Return the prefix of an attempt's keys. Its store may also serve other attempts, and torchrun's own keys."""
    return f"muster/attempt-{env.attempt}"


def listen(env: RankEnv) -> socket.socket:
    """Bind the master port: on loopback if the master address is loopback, else on all addresses of this machine.

    Raises:
        RefusedError: if the port is taken, or this user may not bind it.
    """
    port = env.master_port
    try:
        if _is_loopback(env.master_addr):
            family = socket.AF_INET6 if ":" in env.master_addr else socket.AF_INET
            return socket.create_server((env.master_addr, port), family=family, backlog=BACKLOG)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
        return socket.create_server(("", port), backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RefusedError(f"port {port} is taken on this machine; choose another --master-port") from error
        reason = (error.strerror or str(error)).lower()
        raise RefusedError(f"port {port} cannot be bound: {reason}; choose another --master-port") from error


def answers(address: str, port: int, deadline: float) -> bool:
    """Wait until a port accepts connections; return False if `deadline` (monotonic seconds) passes first."""
    while (remaining_s := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((address, port), timeout=remaining_s) as probe:
                # A socket whose own port happens to be the target port connects to itself, not to the master.
                if probe.getsockname() != probe.getpeername():
                    return True
        except OSError:  # the master has not started yet, or its name cannot be resolved yet
            time.sleep(min(POLL_S, max(deadline - time.monotonic(), 0.0)))
    return False


def meet(store: Store, env: RankEnv, timeout_s: float, held: int | None = None) -> list[Peer]:
    """Wait until every rank has arrived; return them in rank order. `held`: the CUDA device that this rank has used.

    Raises:
        RefusedError: if another process has arrived with the same rank.
        StartTimeoutError: if ranks did not arrive (the message names them), or the process that serves the store ended.
    """
    if store.add(f"claim/{env.rank}", 1) > 1:
        raise RefusedError(
            f"rank {env.rank} was started twice, and the first one continues; give each process its own --rank"
        )
    arrivals = PrefixStore("arrived", store)
    arrivals.set(str(env.rank), json.dumps(asdict(this_peer(held))))
    deadline = time.monotonic() + timeout_s
    for rank in range(env.world_size):
        remaining_s = max(deadline - time.monotonic(), 0.001)
        try:
            arrivals.wait([str(rank)], timedelta(seconds=remaining_s))
        except dist.DistNetworkError as error:
            raise StartTimeoutError(
                f"rank {env.rank} was waiting for the others when the store at {env.master_addr}:{env.master_port} "
                "disappeared, because its process ended; see the output of rank 0"
            ) from error
        except dist.DistStoreError as error:
            missing = [each for each in range(env.world_size) if not arrivals.check([str(each)])]
            if missing:
                raise StartTimeoutError(
                    f"{spell_ranks(missing)} of {env.world_size} did not arrive at {env.master_addr}:{env.master_port} "
                    f"within {timeout_s:g} s; see their output, or raise start_timeout_s"
                ) from error
    return [Peer(**parse_json(arrivals.get(str(rank)))) for rank in range(env.world_size)]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
