"""The ranks that layers are split over, and the collectives between them.

    begin_sum            every rank gets the sum                             all-reduce, in place
    begin_gather         every rank gets the whole sequence                  all-gather
    begin_scatter_sum    every rank gets its part of the sum                 reduce-scatter

Each of these methods returns a function at once, so that this rank can compute while data is sent. The returned
function waits for the result and returns it. With one rank nothing is sent.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.ddp.primitives import all_gather, reduce_scatter

Pending = Callable[[], Tensor]


class Region:
    """A group of ranks. With `sequence_dimension`, activations between split layers are split along that dimension.

    If `group` is None, there is a single rank. `on_wait` is called with True before and False after every wait.
    """

    def __init__(self, group: dist.ProcessGroup | None, sequence_dimension: int | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.sequence_dimension = sequence_dimension if self.ranks > 1 else None
        self.on_wait: Callable[[bool], None] = lambda begins: None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Region":
        """Return this region itself, because a copied model uses the same group."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a split model holds a process group and cannot be pickled; save its state_dict()")

    @property
    def splits_sequence(self) -> bool:
        """True if each rank's activations between split layers are a part of the sequence."""
        return self.sequence_dimension is not None

    def share(self, size: int) -> tuple[int, int]:
        """Return this rank's range of a size that is divisible by the number of ranks."""
        each = size // self.ranks
        return self.rank * each, (self.rank + 1) * each

    def begin_sum(self, x: Tensor) -> Pending:
        """Begin to replace a contiguous tensor by its sum over ranks."""
        return self._begin(x, dist.ReduceOp.SUM)

    def begin_maximum(self, x: Tensor) -> Pending:
        """Begin to replace a contiguous tensor by its maximum over ranks."""
        return self._begin(x, dist.ReduceOp.MAX)

    def _begin(self, x: Tensor, operation: Any) -> Pending:
        if self.ranks == 1:
            return lambda: x
        return self._after(dist.all_reduce(x, op=operation, group=self.group, async_op=True), lambda: x)

    def begin_gather(self, x: Tensor) -> Pending:
        """Begin to concatenate the ranks' parts of the sequence."""
        dimension = self._dimension()
        side_by_side = x.new_empty((self.ranks * x.shape[0], *x.shape[1:]))
        work = all_gather(side_by_side, x.contiguous(), group=self.group, async_op=True)
        if dimension == 0:
            return self._after(work, lambda: side_by_side)
        return self._after(work, lambda: torch.cat(side_by_side.chunk(self.ranks), dimension))

    def begin_scatter_sum(self, x: Tensor) -> Pending:
        """Begin to sum a tensor over ranks; each rank gets its part of the sequence.

        Raises:
            ValueError: If the sequence length is not divisible by the number of ranks.
        """
        dimension = self._dimension()
        self.require_divisible(x)
        parts = x.contiguous() if dimension == 0 else torch.cat(x.chunk(self.ranks, dimension))
        out = x.new_empty((parts.shape[0] // self.ranks, *parts.shape[1:]))
        return self._after(reduce_scatter(out, parts, group=self.group, async_op=True), lambda: out)

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's part of a whole sequence. Nothing is sent.

        Raises:
            ValueError: If the sequence length is not divisible by the number of ranks.
        """
        self.require_divisible(x)
        return x.chunk(self.ranks, self._dimension())[self.rank].contiguous()

    def require_divisible(self, x: Tensor) -> None:
        """Check that the sequence length is divisible by the number of ranks."""
        dimension = self._dimension()
        if x.shape[dimension] % self.ranks:
            raise ValueError(
                f"sequence parallel: dimension {dimension} of {list(x.shape)} is {x.shape[dimension]}, which is not "
                f"divisible by {self.ranks} ranks; pad it, or parallelize without sequence_parallel"
            )

    def require_first_order(self) -> None:
        """Refuse a second differentiation, because the communication of a backward is not part of the graph.

        Raises:
            RuntimeError: If the running backward has create_graph=True.
        """
        if self.ranks > 1 and torch.is_grad_enabled():
            raise RuntimeError(
                f"a backward with create_graph=True through layers that are split over {self.ranks} ranks: their "
                "communication has no second derivative; compute it on a model that is not split"
            )

    def _dimension(self) -> int:
        assert self.sequence_dimension is not None
        return self.sequence_dimension

    def _after(self, work: Any, result: Pending) -> Pending:
        def wait() -> Tensor:
            self.on_wait(True)
            work.wait()
            self.on_wait(False)
            return result()

        return wait
