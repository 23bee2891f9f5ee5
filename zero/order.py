"""Check that all ranks begin the same operations and run the same units in the same order, so that gathers match."""

import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from muster.ddp.checks import gather_json
from muster.ddp.means import Wait


class SameOrder:
    """A comparison of operations and unit orders between ranks.

    It runs only on CPUs, because on GPUs the host would wait for its result.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._compares = device.type == "cpu" and dist.get_world_size(group) > 1
        self._asked: tuple[Tensor, dist.Work] | None = None  # result and work handle of the current comparison

    def begin(self, what: str, waiting: Callable[[Wait], None]) -> None:
        """Check that all ranks begin the same operation, before the operation sends anything. This collective sends two
        numbers.

        Raises:
            RuntimeError: On all ranks, if operations differ. The message lists each rank's operation.
        """
        if not self._compares:
            return
        both, work = self._compare(what)
        waiting(work.wait)
        if _differ(both):
            said = gather_json(what, self._group, torch.device("cpu"))
            told = "; ".join(f"rank {rank}: {each}" for rank, each in said.items())
            raise RuntimeError(
                f"the ranks begin different operations: {told}. In stage 3 each of these is a collective; run the same "
                "number of steps on all ranks, and evaluate, save and load on all of them"
            )

    def ask(self, order: Sequence[int]) -> None:
        """Begin to compare the order of units. If all ranks agree, the maximum and minimum of a checksum are equal."""
        if self._compares:
            self._asked = self._compare(repr(list(order)))

    def require(self, describe: Callable[[], str]) -> None:
        """Check the result of the last `ask`.

        Raises:
            RuntimeError: If the ranks' orders differ. `describe` returns this rank's order, for the message.
        """
        if self._asked is None:
            return
        (both, work), self._asked = self._asked, None
        work.wait()
        if _differ(both):
            raise RuntimeError(
                f"the ranks have run different units, or in different orders: this rank ran {describe()}; gathers are "
                "collectives, so run the same units in the same order on all ranks, or use stage=2"
            )

    def _compare(self, what: str) -> tuple[Tensor, dist.Work]:
        number = zlib.crc32(what.encode())
        both = torch.tensor([number, -number])
        work = dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        return both, work


def _differ(both: Tensor) -> bool:
    highest, lowest = both.tolist()
    return bool(highest != -lowest)
