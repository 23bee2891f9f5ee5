"""A mesh of ranks in three dimensions: data (copies of the model), pipe (stages), tensor (parts of a layer).

    rank = (pipe x data + data) x tensor + tensor                  2 pipe x 2 data x 2 tensor

    pipe 0   data 0   | 0 1 |    tensor ranks are adjacent: they exchange activations four times in every layer and
             data 1   | 2 3 |    wait for them, so they belong on one host, on the fastest links
    pipe 1   data 0   | 4 5 |    data ranks come next: gradients are large, but sent once per step, during the backward
             data 1   | 6 7 |    pipe ranks are furthest apart: one activation per micro-batch goes to one neighbour

This is the order of Megatron-LM (Narayanan et al. 2021) and of torchtitan.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal

import torch.distributed as dist

Axis = Literal["data", "pipe", "tensor", "model"]

AXES: Final[tuple[Axis, ...]] = ("tensor", "data", "pipe", "model")  # every rank creates its groups in this order


@dataclass(frozen=True)
class Mesh:
    """The number of ranks in each dimension. Ranks count from 0 within the group that the mesh covers.

    Raises:
        ValueError: If a dimension is less than 1.
    """

    data: int = 1
    pipe: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in ("data", "pipe", "tensor"):
            if (ranks := getattr(self, axis)) < 1:
                raise ValueError(f"mesh: {axis} must be at least 1, got {ranks}")

    @property
    def ranks(self) -> int:
        """Total number of ranks."""
        return self.data * self.pipe * self.tensor

    def require(self, world_size: int) -> None:
        """Check that the mesh has exactly `world_size` ranks.

        Raises:
            ValueError: If the mesh has more or fewer ranks.
        """
        if self.ranks != world_size:
            raise ValueError(
                f"mesh: data {self.data} x pipe {self.pipe} x tensor {self.tensor} = {self.ranks} ranks, "
                f"but the world has {world_size}; choose dimensions whose product is the world size"
            )

    def data_rank(self, rank: int) -> int:
        """Return the index of the model copy that a rank belongs to."""
        return rank // self.tensor % self.data

    def pipe_rank(self, rank: int) -> int:
        """Return the position of a rank in its pipeline."""
        return rank // (self.tensor * self.data)

    def tensor_rank(self, rank: int) -> int:
        """Return the index of a rank's part in every split layer."""
        return rank % self.tensor

    def rank_at(self, *, data: int = 0, pipe: int = 0, tensor: int = 0) -> int:
        """Return the rank at these coordinates."""
        return (pipe * self.data + data) * self.tensor + tensor

    def ranks_of(self, axis: Axis, rank: int) -> list[int]:
        """List the ranks that share all coordinates with `rank` except `axis`, in increasing order.

        For `model`, only the data coordinate is shared: these ranks together hold one copy of the model.
        """
        data, pipe, tensor = self.data_rank(rank), self.pipe_rank(rank), self.tensor_rank(rank)
        if axis == "data":
            return [self.rank_at(data=each, pipe=pipe, tensor=tensor) for each in range(self.data)]
        pipes = range(self.pipe) if axis in ("pipe", "model") else [pipe]
        tensors = range(self.tensor) if axis in ("tensor", "model") else [tensor]
        return [self.rank_at(data=data, pipe=each, tensor=other) for each in pipes for other in tensors]

    def groups(self, world: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> "Groups":
        """Create the groups of this rank. Every rank of `world` (default: the whole world) must call this.

        A group that would contain all ranks of `world` is `world` itself. Axes with the same ranks share one group.
        `timeout` applies to new groups; None means PyTorch's default, whatever the timeout of `world` is.

        Raises:
            ValueError: If the mesh and `world` differ in size, or NCCL cannot create the groups. No group is created.
        """
        whole = world if world is not None else dist.group.WORLD
        assert whole is not None, "no process group"
        self.require(dist.get_world_size(whole))
        _require_can_split(whole)
        rank, made = dist.get_rank(whole), dict[tuple[int, ...], dist.ProcessGroup]()
        made[tuple(range(self.ranks))] = whole
        for axis in AXES:
            ranks = tuple(self.ranks_of(axis, rank))
            if ranks not in made:
                made[ranks] = _group_of([dist.get_global_rank(whole, each) for each in ranks], whole, timeout)
        return Groups(whole, **{axis: made[tuple(self.ranks_of(axis, rank))] for axis in AXES})


@dataclass(frozen=True)
class Groups:
    """The groups that one rank belongs to. The ranks of `model` together hold one copy of the model."""

    world: dist.ProcessGroup
    data: dist.ProcessGroup
    pipe: dist.ProcessGroup
    tensor: dist.ProcessGroup
    model: dist.ProcessGroup


def _require_can_split(whole: dist.ProcessGroup) -> None:
    """Refuse an NCCL group of only some ranks if creating it would split the default group, which needs all ranks."""
    first = dist.group.WORLD
    if first is None or dist.get_world_size(whole) == dist.get_world_size(first) or first.bound_device_id is None:
        return
    if dist.get_backend(whole) == dist.Backend.NCCL:
        raise ValueError(
            f"mesh: {dist.get_world_size(whole)} of {dist.get_world_size(first)} ranks cannot create NCCL groups on "
            "their own when init_process_group was given a device_id; omit device_id, or use the whole world"
        )


def _group_of(ranks: list[int], whole: dist.ProcessGroup, timeout: timedelta | None) -> dist.ProcessGroup:
    """Create a group; only its members need to call this. Every rank creates its groups in the same order of axes."""
    group = dist.new_group(ranks, timeout, dist.get_backend(whole), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group
