"""The ranks that layers are split over, and what they send each other.

    begin_sum            every rank gets the sum of all             all-reduce, in place
    begin_gather         of parts of the sequence, all of it        all-gather
    begin_scatter_sum    of the sum, this rank's part               reduce-scatter

What begins is under way while this rank computes on; calling what is returned waits, and gives the result. With one
rank nothing is sent.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from muster.ddp.primitives import all_gather, reduce_scatter

Pending = Callable[[], Tensor]


@_disable_dynamo
def outside_graph(call: Callable[..., Any], *given: Any) -> Any:
    """Call what sends, or draws, where compiled code cannot look: the compiler cuts its graph there."""
    return call(*given)


class Region:
    """A group of ranks; with `sequence_dimension`, what lies between split layers is split along that dimension.

    `group` None is a rank alone.
    """

    def __init__(self, group: dist.ProcessGroup | None, sequence_dimension: int | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.sequence_dimension = sequence_dimension if self.ranks > 1 else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Region":
        """A copy of a model talks in the same group."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a split model holds a process group: it cannot be pickled; save its state_dict()")

    @property
    def splits_sequence(self) -> bool:
        """True where activations between split layers are parts of a sequence."""
        return self.sequence_dimension is not None

    def share(self, size: int) -> tuple[int, int]:
        """Return this rank's range of a size that the ranks divide."""
        each = size // self.ranks
        return self.rank * each, (self.rank + 1) * each

    def begin_sum(self, x: Tensor) -> Pending:
        """Replace a contiguous tensor by its sum over ranks."""
        return self._begin(x, dist.ReduceOp.SUM)

    def begin_maximum(self, x: Tensor) -> Pending:
        """Replace a contiguous tensor by its maximum over ranks."""
        return self._begin(x, dist.ReduceOp.MAX)

    def _begin(self, x: Tensor, operation: Any) -> Pending:
        if self.ranks == 1:
            return lambda: x
        return _after(dist.all_reduce(x, op=operation, group=self.group, async_op=True), lambda: x)

    def begin_gather(self, x: Tensor) -> Pending:
        """Put the ranks' parts of the sequence side by side."""
        dimension = self._dimension()
        side_by_side = x.new_empty((self.ranks * x.shape[0], *x.shape[1:]))
        work = all_gather(side_by_side, x.contiguous(), group=self.group, async_op=True)
        if dimension == 0:
            return _after(work, lambda: side_by_side)
        return _after(work, lambda: torch.cat(side_by_side.chunk(self.ranks), dimension))

    def begin_scatter_sum(self, x: Tensor) -> Pending:
        """Sum over ranks, and give each its part of the sequence.

        Raises:
            ValueError: the ranks do not divide the sequence.
        """
        dimension = self._dimension()
        self.require_divisible(x)
        parts = x.contiguous() if dimension == 0 else torch.cat(x.chunk(self.ranks, dimension))
        out = x.new_empty((parts.shape[0] // self.ranks, *parts.shape[1:]))
        return _after(reduce_scatter(out, parts, group=self.group, async_op=True), lambda: out)

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's part of a sequence that it has whole; nothing is sent.

        Raises:
            ValueError: the ranks do not divide the sequence.
        """
        self.require_divisible(x)
        return x.chunk(self.ranks, self._dimension())[self.rank].contiguous()

    def require_divisible(self, x: Tensor) -> None:
        """Check that a sequence can be split evenly."""
        dimension = self._dimension()
        if x.shape[dimension] % self.ranks:
            raise ValueError(
                f"sequence parallel: dimension {dimension} of {list(x.shape)} is {x.shape[dimension]}, which "
                f"{self.ranks} ranks do not divide; pad it, or parallelize without sequence_parallel"
            )

    def require_first_order(self) -> None:
        """Check, in a backward, that its gradients shall have none: what it sends would be left out of their graph.

        Raises:
            RuntimeError: it is one with create_graph=True.
        """
        if self.ranks > 1 and torch.is_grad_enabled():
            raise RuntimeError(
                f"a backward with create_graph=True through layers that are split over {self.ranks} ranks: what they "
                "send in it has no gradient; take gradients of gradients on a model that is not split"
            )

    def _dimension(self) -> int:
        assert self.sequence_dimension is not None
        return self.sequence_dimension


def _after(work: Any, result: Pending) -> Pending:
    def wait() -> Tensor:
        work.wait()
        return result()

    return wait
