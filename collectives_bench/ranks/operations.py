"""The table of all operations of `catalog.py`, with the classes that run them."""

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from muster.collectives_bench.catalog import DTYPES as ITEMSIZES
from muster.collectives_bench.catalog import OPERATIONS
from muster.collectives_bench.ranks.calls import (
    ROOT,
    Call,
    Exchanged,
    FromPeer,
    FromRoot,
    Gathered,
    GatheredAtRoot,
    Overwritten,
    ReduceScattered,
    Scattered,
    Setup,
    Summed,
    SummedAtRoot,
)
from muster.collectives_bench.records import BenchCell
from muster.ddp import primitives
from muster.ddp.primitives import begin, wait

PLACES: Final = {"in": "over", "out": "beside"}


class SendRecv(FromPeer):
    """A ring, in which every rank sends to the next rank and receives from the previous one at the same time."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, (setup.rank - 1) % setup.ranks)
        self._sends = [(self.input, (self.rank + 1) % self.ranks)]
        self._receives = [(self.output, (self.rank - 1) % self.ranks)]

    def start(self, later: bool) -> None:
        wait(begin(self.group, sends=self._sends, receives=self._receives))


class PingPong(FromPeer):
    """A ping-pong: rank 0 sends a message to rank 1, which replies after it has received the whole message.

    Other ranks do nothing.
    """

    parts = 2

    def __init__(self, setup: Setup) -> None:
        peer = 1 - setup.rank
        super().__init__(setup, peer if setup.rank < 2 else None)
        self._sends, self._receives = [(self.input, peer)], [(self.output, peer)]

    def start(self, later: bool) -> None:
        if self.rank == 0:
            wait(begin(self.group, sends=self._sends))
            wait(begin(self.group, receives=self._receives))
        elif self.rank == 1:
            wait(begin(self.group, receives=self._receives))
            wait(begin(self.group, sends=self._sends))


class Barrier(Call):
    """The barrier, which has no result to check."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        # NCCL's barrier runs on a GPU, which it guesses if none is named.
        self._devices = [setup.device.index] if dist.get_backend(setup.group) == "nccl" else None

    def buffers(self) -> list[Tensor]:
        return []

    def refill(self) -> None:
        pass

    def start(self, later: bool) -> Any:
        return dist.barrier(group=self.group, async_op=later, device_ids=self._devices)

    def wrong(self) -> int:
        return 0


class GatherScatterMean(Overwritten):
    """The mean over ranks, computed by the root: it gathers, adds in rank order, divides and scatters."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.others = [setup.buffer(setup.count) for _ in range(setup.ranks - 1)] if setup.rank == ROOT else []

    def buffers(self) -> list[Tensor]:
        return [self.buffer, *self.others]

    def start(self, later: bool) -> None:
        if self.ranks == 1:
            return
        is_root = self.rank == ROOT
        dist.gather(self.buffer, [self.buffer, *self.others] if is_root else None, group_dst=ROOT, group=self.group)
        for other in self.others:
            self.buffer += other
        if is_root:
            self.buffer /= self.ranks
        mine = self.others[0] if is_root else self.buffer  # the root already has the mean
        dist.scatter(mine, [self.buffer] * self.ranks if is_root else None, group_src=ROOT, group=self.group)

    def wrong(self) -> int:
        return self.pattern.wrong_sum(self.buffer, self.number, mean=True)


def _of(shape: type[Call], start: Callable[[Any, bool], Any]) -> type[Call]:
    """Return a `Call` class with this start function. If `start` returns an object, the call waits for it."""
    return type(shape.__name__, (shape,), {"start": start})


CALLS: Final[dict[str, type[Call]]] = {
    "all_reduce": _of(Summed, lambda c, later: dist.all_reduce(c.buffer, group=c.group, async_op=later)),
    "all_gather": _of(
        Gathered, lambda c, later: primitives.all_gather(c.output, c.input, group=c.group, async_op=later)
    ),
    "reduce_scatter": _of(
        ReduceScattered, lambda c, later: primitives.reduce_scatter(c.output, c.input, group=c.group, async_op=later)
    ),
    "broadcast": _of(
        FromRoot, lambda c, later: dist.broadcast(c.buffer, group_src=ROOT, group=c.group, async_op=later)
    ),
    "reduce": _of(SummedAtRoot, lambda c, later: dist.reduce(c.buffer, group_dst=ROOT, group=c.group, async_op=later)),
    "gather": _of(
        GatheredAtRoot,
        lambda c, later: dist.gather(c.input, c.places or None, group_dst=ROOT, group=c.group, async_op=later),
    ),
    "scatter": _of(
        Scattered, lambda c, later: dist.scatter(c.output, c.pieces, group_src=ROOT, group=c.group, async_op=later)
    ),
    "all_to_all": _of(
        Exchanged, lambda c, later: dist.all_to_all_single(c.output, c.input, group=c.group, async_op=later)
    ),
    "send_recv": SendRecv,
    "ping_pong": PingPong,
    "barrier": Barrier,
    # Muster's own operations, for comparison with the library's.
    "ring_all_reduce": _of(Summed, lambda c, _: primitives.ring_all_reduce(c.buffer, c.group)),
    "ring_reduce_scatter": _of(
        ReduceScattered, lambda c, _: primitives.ring_reduce_scatter(c.parts_of_input, c.output, c.group)
    ),
    "ring_all_gather": _of(Gathered, lambda c, _: primitives.ring_all_gather(c.input, c.places, c.group)),
    "tree_broadcast": _of(FromRoot, lambda c, _: primitives.tree_broadcast(c.buffer, ROOT, c.group)),
    "tree_reduce": _of(SummedAtRoot, lambda c, _: primitives.tree_reduce(c.buffer, ROOT, c.group)),
    "exchange_reduce_scatter": _of(
        ReduceScattered, lambda c, _: primitives.ordered_reduce_scatter(c.parts_of_input, c.output, c.group)
    ),
    "gather_scatter": GatherScatterMean,
}
MESSAGES: Final = frozenset({"send_recv", "ping_pong"} | {name for name, each in OPERATIONS.items() if each.ours})
COLLECTIVE: Final = "gather_scatter"  # the only operation of Muster that uses the library's gather and scatter


def unsupported(cell: BenchCell, backend: str, device: torch.device | str) -> str | None:
    """Return the reason why a cell cannot be measured here, or None. Call this before `prepare`."""
    kind = torch.device(device).type
    if backend == "nccl" and kind != "cuda":
        return f"nccl supports only GPU tensors, but these are on {kind}: set device: cuda, or backend: gloo"
    if cell.call == "async" and cell.operation in MESSAGES:
        return f"{cell.operation} consists of successive sends and receives and has no async_op: set calls: sync"
    if backend == "gloo" and kind == "cuda" and cell.operation in MESSAGES - {COLLECTIVE}:
        return f"{cell.operation}: gloo's send and recv support only CPU tensors: set backend: nccl"
    if cell.operation == COLLECTIVE and cell.dtype == "int32":
        return "gather_scatter computes a mean, which integers cannot represent: measure fp32"
    if cell.place not in OPERATIONS[cell.operation].places:
        return f"{cell.operation} has no variant with its result {PLACES[cell.place]} its input: set places: default"
    return None


def prepare(cell: BenchCell, nbytes: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    """Allocate the buffers of a cell; `nbytes` is S as returned by `catalog.actual_bytes`.

    All ranks of the group must call this in the same order, because NCCL's first call must include all ranks.

    Raises:
        ValueError: if a sum over this many ranks is not exact in this dtype.
    """
    count, rest = divmod(nbytes, ITEMSIZES[cell.dtype])
    ranks = dist.get_world_size(group)
    assert rest == 0, f"{nbytes} bytes are not a multiple of the size of {cell.dtype}"
    assert count % (ranks if OPERATIONS[cell.operation].chunked else 1) == 0, (
        f"{nbytes} bytes cannot be split into {ranks} equal chunks"
    )
    if device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return CALLS[cell.operation](Setup(cell, count, group, device))
