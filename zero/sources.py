"""Sources of an optimizer's shards: where gradients come from, and who gathers the parameters after its step.

Alone     every rank has whole gradients; the optimizer steps its part, and gathers before the step returns
Joined    the optimizer of a wrapper: gradients arrive as shards, and the wrapper gathers the parameters later
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

FLAT_MB: Final = 25.0  # size of the optimizer's own flat tensors; building one needs extra memory of this size


class Source(ABC):
    """Where the shards of an optimizer's parameters and gradients are."""

    group: Group
    exact = False
    joins = True  # adjacent parameters of one group are stepped as one tensor

    @abstractmethod
    def homes(self, parameters: Named) -> list[FlatParameters]:
        """Return the flat tensors that contain these parameters.

        Raises:
            ValueError: If a parameter is in none.
        """

    @abstractmethod
    def mend(self) -> None:
        """Accept changes to parameters before a step, for example by loading.

        Raises:
            RuntimeError: If a parameter has another shape, type or device than when it was sharded.
        """

    @abstractmethod
    def collect(self) -> None:
        """Prepare gradients for use.

        Raises:
            RuntimeError: If one cannot be sharded. Raised on every rank that has it.
        """

    @abstractmethod
    def gradient(self, home: FlatParameters, slices: Sequence[Slice]) -> Tensor | None:
        """Return the mean gradient of slices that are stepped as one tensor. It may be changed in place.

        None means that they are not stepped.
        """

    @abstractmethod
    def clipped_with(self, shards: list[Tensor]) -> list[Tensor]:
        """Return the tensors to scale on this rank so that all gradients are clipped; it steps `shards` of them."""

    @abstractmethod
    def spread(self) -> None:
        """Gather the parameters after a step."""

    @abstractmethod
    def forget(self) -> None:
        """Drop all gradients that are not a parameter's `.grad`."""


class Alone(Source):
    """An optimizer without a wrapper: each rank has whole gradients, steps its part, and gathers within the step.

    All ranks must have gradients for the same parameters, as after any synchronization.
    """

    joins = False  # which parameters have a gradient is known only in a step

    def __init__(self, group: Group) -> None:
        self.group = group
        self.made: list[FlatParameters] = []
        self.gather: Gather | None = None
        self._steps = 0

    def homes(self, parameters: Named) -> list[FlatParameters]:
        """Move the parameters into new flat tensors, one at a time, to free old memory before the next."""
        if not parameters:
            return []
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        buckets = deal(parameters, FLAT_MB, alone=False)
        homes = [FlatParameters(bucket[::-1], rank=rank, ranks=ranks) for bucket in reversed(buckets)]
        self.gather = self.gather or gather_for(self.group, parameters[0][1].device)
        self.made += homes
        return homes

    def mend(self) -> None:
        """Accept values that were written to the parameters, in masters too."""
        mend(self.made)
        for home in self.made:
            home.follow_shard()

    def collect(self) -> None:
        """Make all gradients row-major, as parameters are. Most already are."""
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
        """Scale the whole gradients, so that they stay the same on all ranks."""
        return [each.grad for home in self.made for each in home.parameters if each.grad is not None]

    def spread(self) -> None:
        """Gather all trainable parameters, and wait."""
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
        """Do nothing: all gradients are the parameters' own."""


class Joined(Source):
    """The optimizer of a wrapper: gradients arrive as shards, and the wrapper gathers parameters."""

    def __init__(self, wrapper: "Sharded") -> None:
        self.wrapper = wrapper
        self.group = wrapper.process_group
        self.exact = wrapper.exact
        self._mine: set[int] = set()  # ids of this optimizer's parameters
        # Vector kernels treat the end of a tensor separately, so exact steps do not join parameters.
        self.joins = not wrapper.find_unused_parameters and not wrapper.exact

    def homes(self, parameters: Named) -> list[FlatParameters]:
        known = {id(each) for home in self.wrapper.homes for each in home.parameters}
        if strange := [name for name, each in parameters if id(each) not in known]:
            raise ValueError(
                f"parameter {strange[0]} of a group does not belong to the wrapped module; pass only its own"
            )
        asked = {id(each) for _, each in parameters}
        self._mine |= asked
        return [
            home for home in self.wrapper.homes if home.trains and any(id(each) in asked for each in home.parameters)
        ]

    def mend(self) -> None:
        """Check that parameters are still views of the flat tensors."""
        self.wrapper.synchronize()
        mend(self.wrapper.homes)

    def collect(self) -> None:
        """Check that gradients are shards from a synchronized backward.

        Raises:
            RuntimeError: If a parameter has a gradient that only this rank has.
        """
        with as_it_is():
            left = [name for home, name, each in self._own() if each.grad is not None and home.trains]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise RuntimeError(
                f"{left[0]}{more}: has a .grad of this rank alone, which a step would ignore; run the last backward "
                "outside no_sync(), and do not set .grad by hand"
            )

    def _own(self) -> Iterator[tuple[FlatParameters, str, nn.Parameter]]:
        """Yield this optimizer's parameters."""
        for home in self.wrapper.homes:
            for name, each in home.named:
                if id(each) in self._mine:
                    yield home, name, each

    def gradient(self, home: FlatParameters, slices: Sequence[Slice]) -> Tensor | None:
        """View a part of the gradient's shard; None for a parameter that no rank has used."""
        unused = self.wrapper.unused
        if home.grad is None or (unused and any(home.names[at.tensor] in unused for at in slices)):
            return None
        return home.grad[slices[0].offset : slices[-1].offset + slices[-1].elements]

    def clipped_with(self, shards: list[Tensor]) -> list[Tensor]:
        """Scale the shards, because no rank has more."""
        return shards

    def spread(self) -> None:
        self.wrapper.spread()

    def forget(self) -> None:
        """Drop the shards of this optimizer's gradients. Another optimizer of the same wrapper keeps its own."""
        for home in {id(home): home for home, _, _ in self._own()}.values():
            if all(id(each) in self._mine for each in home.parameters):
                home.drop_gradient()
            elif home.grad is not None:
                for at in home.slices:
                    if id(home.parameters[at.tensor]) in self._mine:
                        home.of(home.grad, at).zero_()
        self.wrapper.forget_shards()
