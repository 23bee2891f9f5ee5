"""Whether all ranks have run the same units in one order: else gathers have mixed parts of different ones."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SameOrder:
    """Compares orders of units while the backward runs; on CPUs only, where to know the answer makes nobody wait."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._compares = device.type == "cpu" and dist.get_world_size(group) > 1
        self._asked: tuple[Tensor, Any] | None = None  # what is compared, and what to wait for

    def ask(self, order: Sequence[int]) -> None:
        """Begin to compare: the highest and the lowest of all ranks' numbers are one, or not."""
        if self._compares:
            number = zlib.crc32(repr(list(order)).encode())
            both = torch.tensor([number, -number])
            self._asked = both, dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def require(self, describe: Callable[[], str]) -> None:
        """Check what was asked last.

        Raises:
            RuntimeError: the ranks' orders differ; `describe` tells this rank's.
        """
        if self._asked is None:
            return
        (both, work), self._asked = self._asked, None
        work.wait()
        highest, lowest = both.tolist()
        if highest != -lowest:
            raise RuntimeError(
                f"the ranks have run other units, or in another order: here {describe()}; gathers are collectives: let "
                "all ranks run the same units, or share out less: stage=2"
            )
