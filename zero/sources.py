"""Where an optimizer's shards come from, and who makes the parameters whole after its step.

Alone     gradients are whole on every rank: it copies its part, and gathers before the step returns
Joined    a wrapper's: gradients arrive as shards, and the wrapper gathers when it likes
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.checks import difference_of
from zero.flat import FlatParameters, Named
from zero.gather import Gather, gather_for
from zero.layout import Slice

Group = dist.ProcessGroup | None


class Source(ABC):
    """Where the shards of an optimizer's parameters and gradients are."""

    group: Group
    exact = False
    joins = True  # neighbouring parameters of one group are stepped as one tensor

    @abstractmethod
    def homes(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> list[FlatParameters]:
        """Return the flat tensors that these parameters are in."""

    @abstractmethod
    def collect(self) -> None:
        """Make `grad` of every flat tensor what is to be stepped with."""

    @abstractmethod
    def left_out(self, home: FlatParameters, at: Slice) -> bool:
        """True for a parameter that has no gradient, and is not stepped."""

    @abstractmethod
    def spread(self) -> None:
        """Make the parameters whole from what was stepped."""

    @abstractmethod
    def forget(self) -> None:
        """Drop all gradients."""


class Alone(Source):
    """An optimizer by itself: it takes its shard of gradients that every rank has, and gathers before it returns."""

    joins = False  # which parameters have a gradient is only known in a step

    def __init__(self, group: Group) -> None:
        self.group = group
        self.made: list[FlatParameters] = []
        self.gather: Gather | None = None
        self._seen: dict[int, list[tuple[int, int]]] = {}  # the gradients that the shards were copied from

    def homes(self, parameters: Named) -> list[FlatParameters]:
        """Move the parameters into new flat tensors, one for each type and device."""
        if not parameters:
            return []
        device = parameters[0][1].device
        lines = [f"parameter {name} {tuple(each.shape)} {each.dtype}" for name, each in parameters]
        if differing := difference_of(lines, self.group, device):
            raise ValueError(f"the ranks' parameters differ: {differing}; pass the same, in one order, on every rank")
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        kinds = dict.fromkeys((each.dtype, each.device) for _, each in parameters)
        homes = [
            FlatParameters(
                [(name, each) for name, each in parameters if (each.dtype, each.device) == kind], rank=rank, ranks=ranks
            )
            for kind in kinds
        ]
        self.gather = self.gather or gather_for(self.group, device)
        self.made += homes
        return homes

    def collect(self) -> None:
        """Copy this rank's ranges out of the whole gradients, unless that has been done since they came."""
        for number, home in enumerate(self.made):
            home.mend()
            seen = [(id(each.grad), -1 if each.grad is None else each.grad._version) for each in home.parameters]
            if home.grad is None or self._seen.get(number) != seen:
                home.grad = _shard_of_gradients(home)
                self._seen[number] = seen

    def left_out(self, home: FlatParameters, at: Slice) -> bool:
        """True for a parameter without a gradient."""
        return home.parameters[at.tensor].grad is None

    def spread(self) -> None:
        """Gather all, and wait."""
        waits = []
        for home in self.made:
            home.grad = None
            home.write_back()
            assert self.gather is not None
            waits.append(self.gather.start(home, home.shard, home.full))
        for wait in waits:
            wait()

    def forget(self) -> None:
        """Drop the shards."""
        for home in self.made:
            home.grad = None


class Wrapper(Protocol):
    """What is asked of a wrapper."""

    process_group: Group
    homes: Sequence[FlatParameters]
    exact: bool
    find_unused_parameters: bool

    @property
    def unused(self) -> frozenset[str]: ...

    def synchronize(self) -> None: ...

    def spread(self) -> None: ...

    def forget_gradients(self) -> None: ...


class Joined(Source):
    """The optimizer of a wrapper: gradients arrive as shards, and parameters are gathered by the wrapper."""

    def __init__(self, wrapper: Wrapper) -> None:
        self.wrapper = wrapper
        self.group = wrapper.process_group
        self.exact = wrapper.exact
        self.joins = not wrapper.find_unused_parameters and not wrapper.exact  # vector kernels end with a tensor

    def homes(self, parameters: Named) -> list[FlatParameters]:
        """Find the wrapper's flat tensors that hold these."""
        known = {id(each) for home in self.wrapper.homes for each in home.parameters}
        if strange := [name for name, each in parameters if id(each) not in known]:
            raise ValueError(f"parameter {strange[0]} of a group is not one of the wrapped module's; pass those only")
        asked = {id(each) for _, each in parameters}
        return [
            home for home in self.wrapper.homes if home.trains and any(id(each) in asked for each in home.parameters)
        ]

    def collect(self) -> None:
        """Check that parameters are where they were; the gradients have come already."""
        self.wrapper.synchronize()
        for home in self.wrapper.homes:
            home.mend()

    def left_out(self, home: FlatParameters, at: Slice) -> bool:
        """True for a parameter that no rank has used."""
        return bool(self.wrapper.unused) and home.names[at.tensor] in self.wrapper.unused

    def spread(self) -> None:
        """Gather."""
        self.wrapper.spread()

    def forget(self) -> None:
        """Drop the shards of gradients."""
        self.wrapper.forget_gradients()


def _shard_of_gradients(home: FlatParameters) -> Tensor:
    shard = torch.zeros_like(home.shard)
    for at in home.slices:
        gradient = home.parameters[at.tensor].grad
        if gradient is not None:
            home.of(shard, at).copy_(gradient.detach().reshape(-1)[at.start : at.stop])
    return shard
