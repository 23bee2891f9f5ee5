"""Whether all ranks begin the same, and run the same units in one order: else gathers have mixed different ones."""

import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from muster.ddp.checks import gather_json
from muster.ddp.means import Wait


class SameOrder:
    """Compares orders of units while the backward runs; on CPUs only, where to know the answer makes nobody wait."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._compares = device.type == "cpu" and dist.get_world_size(group) > 1
        self._asked: tuple[Tensor, dist.Work] | None = None  # what is compared, and what to wait for

    def begin(self, what: str, waiting: Callable[[Wait], None]) -> None:
        """Check that all ranks begin the same, before anything of it is sent: a collective of two numbers.

        Raises:
            RuntimeError: on all ranks, with what each of them begins.
        """
        if not self._compares:
            return
        both, work = self._compare(what)
        waiting(work.wait)
        if _differ(both):
            said = gather_json(what, self._group, torch.device("cpu"))
            told = "; ".join(f"rank {rank}: {each}" for rank, each in said.items())
            raise RuntimeError(
                f"the ranks do not do the same: {told}. Each of these is a collective in stage 3: let all ranks take "
                "as many steps, and evaluate, save and load together"
            )

    def ask(self, order: Sequence[int]) -> None:
        """Begin to compare: the highest and the lowest of all ranks' numbers are one, or not."""
        if self._compares:
            self._asked = self._compare(repr(list(order)))

    def require(self, describe: Callable[[], str]) -> None:
        """Check what was asked last.

        Raises:
            RuntimeError: the ranks' orders differ; `describe` tells this rank's.
        """
        if self._asked is None:
            return
        (both, work), self._asked = self._asked, None
        work.wait()
        if _differ(both):
            raise RuntimeError(
                f"the ranks have run other units, or in another order: here {describe()}; gathers are collectives: let "
                "all ranks run the same units, or share out less: stage=2"
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
