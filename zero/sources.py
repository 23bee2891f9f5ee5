"""Sources of an optimizer's shards: they provide the gradients of the shards, and gather the parameters after a step.

Alone     no wrapper: every rank has whole gradients, and the parameters are gathered before the step returns
Joined    a wrapper's optimizer, in `sharded.py`: gradients arrive as shards, and the wrapper gathers parameters later
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch.distributed as dist
from torch import Tensor, nn

from muster.ddp.gradients import Named, deal, is_dense, refuse_sparse
from muster.ddp.means import Group
from muster.ddp.timeouts import Entered, waiting_for
from muster.zero.flat import FlatParameters, mend
from muster.zero.gather import Gather, gather_for
from muster.zero.layout import Slice

FLAT_MB: Final = 25.0  # maximum size of the optimizer's own flat tensors; building one needs as much extra memory


class Source(ABC):
    """The provider of the shards of an optimizer's parameters and gradients."""

    group: Group
    exact = False
    joins = True  # adjacent parameters of one group are stepped as one tensor

    @abstractmethod
    def flat_parameters(self, parameters: Named) -> list[FlatParameters]:
        """Return the flat tensors that contain these parameters.

        Raises:
            ValueError: If a parameter is in no flat tensor.
        """

    @abstractmethod
    def mend(self) -> None:
        """Accept values that were written to parameters since the last step, for example by loading.

        Raises:
            RuntimeError: If a parameter has another shape, type or device than when it was sharded.
        """

    @abstractmethod
    def collect(self) -> None:
        """Check gradients, and prepare them for the step.

        Raises:
            RuntimeError: On each rank with a gradient that cannot be sharded.
        """

    @abstractmethod
    def gradient(self, flat_parameter: FlatParameters, slices: Sequence[Slice]) -> Tensor | None:
        """Return the mean gradient of slices that are stepped as one tensor, or None if the slices must not be stepped.

        The gradient may be changed in place.
        """

    @abstractmethod
    def clipped_with(self, shards: list[Tensor]) -> list[Tensor]:
        """Return the tensors that this rank must scale to clip all gradients.

        `shards` are the shards of gradients with which this rank steps.
        """

    @abstractmethod
    def spread(self) -> None:
        """Gather the parameters after a step."""

    @abstractmethod
    def forget(self, *, set_to_none: bool) -> None:
        """Drop all gradients that are not a parameter's `.grad`, or replace them by zeros."""


class Alone(Source):
    """The source of an optimizer without a wrapper. Each rank has whole gradients, steps its part, and then gathers.

    All ranks must have gradients for the same parameters, as after any synchronization.
    """

    joins = False  # because only a step shows which parameters have no gradient

    def __init__(self, group: Group) -> None:
        self.group = group
        self.made: list[FlatParameters] = []
        self.gather: Gather | None = None
        self._steps = 0
        # During a step, parameters with gradients that are not row-major have copies: (parameter, gradient, copy).
        self._copied: list[tuple[nn.Parameter, Tensor, Tensor]] = []

    def flat_parameters(self, parameters: Named) -> list[FlatParameters]:
        """Move the parameters into new flat tensors. Those that are not row-major stay, because DDP relies on strides.

        The old memory of one flat tensor's parameters is freed before the next flat tensor is allocated.
        """
        if not parameters:
            return []
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        buckets = deal(parameters, FLAT_MB, alone=False)
        flat_parameters = [
            FlatParameters(bucket[::-1], rank=rank, ranks=ranks, keeps_strides=True) for bucket in reversed(buckets)
        ]
        self.gather = self.gather or gather_for(self.group, parameters[0][1].device)
        self.made += flat_parameters
        return flat_parameters

    def mend(self) -> None:
        """Accept values that were written to the parameters: copy them into the masters."""
        mend(self.made)
        for flat_parameter in self.made:
            flat_parameter.copy_apart(back=False)
            flat_parameter.follow_shard()

    def collect(self) -> None:
        """Make all gradients row-major, as shards are, until `spread`."""
        for flat_parameter in self.made:
            for name, parameter in flat_parameter.named:
                if (gradient := parameter.grad) is not None:
                    refuse_sparse(name, gradient)
                    if not gradient.is_contiguous():
                        parameter.grad = gradient.contiguous()
                        if is_dense(gradient):
                            self._copied.append((parameter, gradient, parameter.grad))

    def gradient(self, flat_parameter: FlatParameters, slices: Sequence[Slice]) -> Tensor | None:
        """View this rank's part of a parameter's gradient."""
        (at,) = slices
        gradient = flat_parameter.parameters[at.tensor].grad
        return None if gradient is None else gradient.detach().view(-1)[at.start : at.stop]

    def clipped_with(self, shards: list[Tensor]) -> list[Tensor]:
        """Return the whole gradients, which must stay the same on all ranks."""
        return [
            each.grad for flat_parameter in self.made for each in flat_parameter.parameters if each.grad is not None
        ]

    def spread(self) -> None:
        """Gather all trainable parameters, and wait until this is done."""
        self._steps += 1
        waits = []
        for flat_parameter in self.made:
            if any(each.requires_grad or each.grad is not None for each in flat_parameter.parameters):
                flat_parameter.write_back()
                assert self.gather is not None
                waits.append(
                    (flat_parameter, self.gather.start(flat_parameter, flat_parameter.shard, flat_parameter.full))
                )
        for number, (flat_parameter, wait) in enumerate(waits):
            first, last = flat_parameter.names[0], flat_parameter.names[-1]
            entered = Entered(self._steps, number, len(waits), len(waits), first, last, flat_parameter.full_bytes)
            with waiting_for(entered, self.group):
                wait()
            flat_parameter.copy_apart(back=True)
        self._restore_gradients()

    def _restore_gradients(self) -> None:
        """Restore the layout of gradients, because autograd and DDP expect that of the parameters."""
        for parameter, gradient, copied in self._copied:
            if parameter.grad is copied:
                parameter.grad = gradient.detach().copy_(copied)
        self._copied = []

    def forget(self, *, set_to_none: bool) -> None:
        """Drop the original layout of gradients. Every gradient is a parameter's `.grad`."""
        self._copied = []
