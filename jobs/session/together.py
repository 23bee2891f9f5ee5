"""Exchange a few numbers among a session's ranks, about twice a second, to agree on saves and stops.

A session of several ranks creates its own gloo group beside the program's groups, so that an exchange neither waits for
a device nor disturbs the program's collectives. A single rank exchanges nothing, and does not need torch.
"""

import gc
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.errors import MusterError, RefusedError, StartTimeoutError
from muster.jobs.hosts.ranks import RankEnv

if TYPE_CHECKING:
    import torch.distributed as dist

    from muster.jobs.world.world import World

JOIN_S: Final = 1800.0  # timeout for the slowest rank, which may prepare data while the others wait


class OneRank:
    """A world of one rank."""

    rank = 0
    size = 1
    world: "World | None" = None
    group = None

    def meet(self) -> None:
        """Wait until every rank has called this."""

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers, in rank order. All ranks must pass equally many."""
        return [list(numbers)]

    def share(self, value: Any) -> Any:
        """Return rank 0's value, which must be valid JSON. If it is a MusterError, raise it."""
        if isinstance(value, MusterError):
            raise value
        return value

    def close(self) -> None:
        """End the exchange. A single rank has nothing to end."""


class Together(OneRank):
    """A world of several ranks, connected by the session's own gloo group."""

    def __init__(self, env: RankEnv) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise RefusedError(
                f"session: the {env.world_size} ranks cannot agree, because torch.distributed is not initialized; "
                "call torch.distributed.init_process_group() before run.state() and run.steps()"
            )
        if (dist.get_rank(), dist.get_world_size()) != (env.rank, env.world_size):
            raise RefusedError(
                f"session: the environment says rank {env.rank} of {env.world_size}, but init_process_group() was "
                f"given rank {dist.get_rank()} of {dist.get_world_size()}; pass it the same numbers"
            )
        import torch

        from muster.jobs.world.world import World

        self.world = World(env.rank, env.world_size, own_group(env), torch.device("cpu"))
        self.rank, self.size = env.rank, env.world_size

    def meet(self) -> None:
        """Wait until every rank has called this: a collective."""
        assert self.world is not None
        self.world.meet()

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers: a collective."""
        import torch

        assert self.world is not None
        mine = torch.tensor(numbers, dtype=torch.float64)
        return [each.tolist() for each in self.world.gather(mine)]

    def share(self, value: Any) -> Any:
        """Return rank 0's value: a collective. If it is a MusterError, raise it on every rank."""
        import torch

        assert self.world is not None
        error = {"error": str(value), "code": value.exit_code} if isinstance(value, MusterError) else None
        text = json.dumps(error or {"value": value}).encode() if self.rank == 0 else b""
        size = int(self.exchange([float(len(text))])[0][0])
        mine = torch.zeros(size, dtype=torch.uint8)
        if self.rank == 0:
            mine[:] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        said = json.loads(bytes(self.world.gather(mine)[0].tolist()))
        if "error" not in said:
            return said["value"]
        if isinstance(value, MusterError):
            raise value
        told = MusterError(f"rank 0: {said['error']}")
        told.exit_code = said["code"]
        raise told

    def close(self) -> None:
        """Destroy the process groups that the program left open, which ends their threads.

        A gloo thread may still be freeing the last collective's tensors. If the interpreter ends meanwhile, the process
        aborts.
        """
        import torch.distributed as dist

        self.world = None
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # a DistributedDataParallel is in a reference cycle that keeps its group alive


def own_group(env: RankEnv) -> "dist.ProcessGroup":
    """Create a gloo group beside those of the program: a collective.

    Raises:
        StartTimeoutError: if a rank has not called this in time.
    """
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    from muster.jobs.world.world import COLLECTIVE_TIMEOUT_S

    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=JOIN_S))
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise StartTimeoutError(
            f"session: not every rank has reached run.state() within {JOIN_S:g} s (rank {env.rank} waited); "
            "all ranks must call run.state() and run.steps(), or none"
        ) from error
    assert isinstance(group, dist.ProcessGroup)
    _set_pg_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S), group)
    return group


def agree(env: RankEnv) -> OneRank:
    """Return the world of this program's ranks: a collective.

    Raises:
        RefusedError: if there are several ranks, but the program has not initialized torch.distributed.
    """
    return OneRank() if env.world_size == 1 else Together(env)
