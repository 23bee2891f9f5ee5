"""Ranks in three dimensions: copies of the model, stages of a copy, and parts of a stage's layers.

    rank = (pipe x data + data) x tensor + tensor                  2 pipe x 2 data x 2 tensor

    pipe 0   data 0   | 0 1 |    tensor ranks are neighbours: they exchange activations four times in every layer and
             data 1   | 2 3 |    wait for them, so they want one host, and the fastest links
    pipe 1   data 0   | 4 5 |    data ranks next: gradients are large, but sent once a step, beside the backward
             data 1   | 6 7 |    pipe ranks are furthest: a stage sends one activation a micro-batch, to one neighbour

Megatron-LM's order (Narayanan et al. 2021), and torchtitan's.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal

import torch.distributed as dist

Axis = Literal["data", "pipe", "tensor", "model"]

AXES: Final[tuple[Axis, ...]] = ("tensor", "data", "pipe", "model")  # groups are made in this order on every rank


@dataclass(frozen=True)
class Mesh:
    """How many ranks each dimension has. Ranks are numbered from 0, as the world's or any group's are.

    Raises:
        ValueError: a dimension is less than 1.
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
        """How many ranks it takes."""
        return self.data * self.pipe * self.tensor

    def require(self, world_size: int) -> None:
        """Check that the mesh is the whole world.

        Raises:
            ValueError: it is not.
        """
        if self.ranks != world_size:
            raise ValueError(
                f"mesh: data {self.data} x pipe {self.pipe} x tensor {self.tensor} = {self.ranks} ranks, "
                f"the world has {world_size}; the product must be the world"
            )

    def data_rank(self, rank: int) -> int:
        """Which copy of the model a rank belongs to."""
        return rank // self.tensor % self.data

    def pipe_rank(self, rank: int) -> int:
        """Which place in its pipeline a rank has."""
        return rank // (self.tensor * self.data)

    def tensor_rank(self, rank: int) -> int:
        """Which part of its layers a rank has."""
        return rank % self.tensor

    def rank_at(self, *, data: int = 0, pipe: int = 0, tensor: int = 0) -> int:
        """Return the rank with these places."""
        return (pipe * self.data + data) * self.tensor + tensor

    def ranks_of(self, axis: Axis, rank: int) -> list[int]:
        """List the ranks that differ from a rank in one dimension only, in its order; `model`: in all but data.

        The ranks of `model` have one copy of the model together.
        """
        data, pipe, tensor = self.data_rank(rank), self.pipe_rank(rank), self.tensor_rank(rank)
        if axis == "data":
            return [self.rank_at(data=each, pipe=pipe, tensor=tensor) for each in range(self.data)]
        pipes = range(self.pipe) if axis in ("pipe", "model") else [pipe]
        tensors = range(self.tensor) if axis in ("tensor", "model") else [tensor]
        return [self.rank_at(data=data, pipe=each, tensor=other) for each in pipes for other in tensors]

    def groups(self, world: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> "Groups":
        """Make this rank's groups; all ranks of `world`, by default the whole world, must call.

        A group that would be all of `world` is `world`, one that another axis has made already is that one. `timeout`
        is that of new groups; None: PyTorch's default, whatever `world` has.

        Raises:
            ValueError: the product is not the world, or NCCL could not make the groups; before one is made.
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
    """The groups that a rank is in; `model` has one copy of the model: all stages and parts of one data rank."""

    world: dist.ProcessGroup
    data: dist.ProcessGroup
    pipe: dist.ProcessGroup
    tensor: dist.ProcessGroup
    model: dist.ProcessGroup


def _require_can_split(whole: dist.ProcessGroup) -> None:
    """Refuse what would wait for ever: groups split off NCCL's first one are a collective of all its ranks."""
    first = dist.group.WORLD
    if first is None or dist.get_world_size(whole) == dist.get_world_size(first) or first.bound_device_id is None:
        return
    if dist.get_backend(whole) == dist.Backend.NCCL:
        raise ValueError(
            f"mesh: {dist.get_world_size(whole)} of {dist.get_world_size(first)} ranks cannot make NCCL groups by "
            "themselves where init_process_group was given a device_id; leave that out, or use the whole world"
        )


def _group_of(ranks: list[int], whole: dist.ProcessGroup, timeout: timedelta | None) -> dist.ProcessGroup:
    """Make a group of which only its members need to hear; every rank makes one for an axis, in one order of axes."""
    group = dist.new_group(ranks, timeout, dist.get_backend(whole), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group
