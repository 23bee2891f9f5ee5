"""Where an optimizer's shards come from, and who makes the parameters whole after its step.

Alone     gradients are whole on every rank: it steps its part of them, and gathers before the step returns
Joined    a wrapper's: gradients arrive as shards, and the wrapper gathers when it likes
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import torch.distributed as dist
from torch import Tensor, nn

from muster.ddp.gradients import Named, deal, refuse_sparse
from muster.ddp.means import Group
from muster.ddp.timeouts import Entered, waiting_for
from muster.zero.absent import as_it_is
from muster.zero.flat import FlatParameters, mend
from muster.zero.gather import Gather, gather_for
from muster.zero.layout import Slice

if TYPE_CHECKING:
    from muster.zero.sharded import Sharded

FLAT_MB: Final = 25.0  # a flat tensor of the optimizer's own: memory for one more is needed while they are built


class Source(ABC):
    """Where the shards of an optimizer's parameters and gradients are."""

    group: Group
    exact = False
    joins = True  # neighbouring parameters of one group are stepped as one tensor

    @abstractmethod
    def homes(self, parameters: Named) -> list[FlatParameters]:
        """Return the flat tensors that these parameters are in.

        Raises:
            ValueError: it has none for one of them.
        """

    @abstractmethod
    def mend(self) -> None:
        """Take parameters as they are now, before a step: somebody may have loaded others.

        Raises:
            RuntimeError: one has another shape, type or device than when it was sharded.
        """

    @abstractmethod
    def collect(self) -> None:
        """Make gradients ready to be looked at.

        Raises:
            RuntimeError: one cannot be shared out; on every rank that has it.
        """

    @abstractmethod
    def gradient(self, home: FlatParameters, slices: Sequence[Slice]) -> Tensor | None:
        """Return the mean gradient of slices that are stepped as one tensor, to be changed in place.

        None: they are not stepped.
        """

    @abstractmethod
    def clipped_with(self, shards: list[Tensor]) -> list[Tensor]:
        """Return what is scaled on this rank where all gradients are, of which it steps `shards`."""

    @abstractmethod
    def spread(self) -> None:
        """Make the parameters whole from what was stepped."""

    @abstractmethod
    def forget(self) -> None:
        """Drop all gradients that are not a parameter's `.grad`."""


class Alone(Source):
    """An optimizer by itself: every rank has all gradients, it steps its part of them, and gathers in the step.

    Which parameters have a gradient must be the same on all ranks, as it is after any synchronization.
    """

    joins = False  # which parameters have a gradient is only known in a step

    def __init__(self, group: Group) -> None:
        self.group = group
        self.made: list[FlatParameters] = []
        self.gather: Gather | None = None
        self._steps = 0

    def homes(self, parameters: Named) -> list[FlatParameters]:
        """Move the parameters into new flat tensors, one after another: each frees what it took."""
        if not parameters:
            return []
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        buckets = deal(parameters, FLAT_MB, alone=False)
        homes = [FlatParameters(bucket[::-1], rank=rank, ranks=ranks) for bucket in reversed(buckets)]
        self.gather = self.gather or gather_for(self.group, parameters[0][1].device)
        self.made += homes
        return homes

    def mend(self) -> None:
        """Take what somebody has written to parameters, into masters too."""
        mend(self.made)
        for home in self.made:
            home.follow_shard()

    def collect(self) -> None:
        """Make all gradients row-major, as parameters are; most are."""
        for home in self.made:
            for name, parameter in home.named:
                if (gradient := parameter.grad) is not None:
                    refuse_sparse(name, gradient)
                    if not gradient.is_contiguous():
                        parameter.grad = gradient.contiguous()

    def gradient(self, home: FlatParameters, slices: Sequence[Slice]) -> Tensor | None:
        """View this rank's part of a parameter's gradient."""
        (at,) = slices
        gradient = home.parameters[at.tensor].grad
        return None if gradient is None else gradient.detach().view(-1)[at.start : at.stop]

    def clipped_with(self, shards: list[Tensor]) -> list[Tensor]:
        """Scale whole gradients, which every rank has: they stay the same on all."""
        return [each.grad for home in self.made for each in home.parameters if each.grad is not None]

    def spread(self) -> None:
        """Gather all that learn, and wait."""
        self._steps += 1
        waits = []
        for home in self.made:
            if any(each.requires_grad or each.grad is not None for each in home.parameters):
                home.write_back()
                assert self.gather is not None
                waits.append((home, self.gather.start(home, home.shard, home.full)))
        for number, (home, wait) in enumerate(waits):
            first, last = home.names[0], home.names[-1]
            entered = Entered(self._steps, number, len(waits), len(waits), first, last, home.full_bytes)
            with waiting_for(entered, self.group):
                wait()

    def forget(self) -> None:
        """Do nothing: gradients are the parameters'."""


class Joined(Source):
    """The optimizer of a wrapper: gradients arrive as shards, and parameters are gathered by the wrapper."""

    def __init__(self, wrapper: "Sharded") -> None:
        self.wrapper = wrapper
        self.group = wrapper.process_group
        self.exact = wrapper.exact
        self._mine: set[int] = set()  # parameters, by identity
        self.joins = not wrapper.find_unused_parameters and not wrapper.exact  # vector kernels end with a tensor

    def homes(self, parameters: Named) -> list[FlatParameters]:
        known = {id(each) for home in self.wrapper.homes for each in home.parameters}
        if strange := [name for name, each in parameters if id(each) not in known]:
            raise ValueError(f"parameter {strange[0]} of a group is not one of the wrapped module's; pass those only")
        asked = {id(each) for _, each in parameters}
        self._mine |= asked
        return [
            home for home in self.wrapper.homes if home.trains and any(id(each) in asked for each in home.parameters)
        ]

    def mend(self) -> None:
        """Check that parameters are where they were."""
        self.wrapper.synchronize()
        mend(self.wrapper.homes)

    def collect(self) -> None:
        """Check that shards have come with the backward, and nothing else.

        Raises:
            RuntimeError: a parameter has a gradient of this rank alone.
        """
        with as_it_is():
            left = [name for home, name, each in self._own() if each.grad is not None and home.trains]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise RuntimeError(
                f"{left[0]}{more}: has a .grad of this rank alone, which a step would leave out; run the last backward "
                "outside no_sync(), and do not set .grad by hand"
            )

    def _own(self) -> Iterator[tuple[FlatParameters, str, nn.Parameter]]:
        """Yield this optimizer's parameters."""
        for home in self.wrapper.homes:
            for name, each in home.named:
                if id(each) in self._mine:
                    yield home, name, each

    def gradient(self, home: FlatParameters, slices: Sequence[Slice]) -> Tensor | None:
        """View a part of the shard that has come; a parameter that no rank has used is not stepped."""
        unused = self.wrapper.unused
        if home.grad is None or (unused and any(home.names[at.tensor] in unused for at in slices)):
            return None
        return home.grad[slices[0].offset : slices[-1].offset + slices[-1].elements]

    def clipped_with(self, shards: list[Tensor]) -> list[Tensor]:
        """Scale the shards: no rank has more."""
        return shards

    def spread(self) -> None:
        self.wrapper.spread()

    def forget(self) -> None:
        """Drop the shards of this optimizer's gradients; another one of the same wrapper keeps its own."""
        for home in {id(home): home for home, _, _ in self._own()}.values():
            if all(id(each) in self._mine for each in home.parameters):
                home.drop_gradient()
            elif home.grad is not None:
                for at in home.slices:
                    if id(home.parameters[at.tensor]) in self._mine:
                        home.of(home.grad, at).zero_()
        self.wrapper.forget_shards()
