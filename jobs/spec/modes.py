"""Modes: how training is split. Each is a row that expands to one frozen `Parallel`; the loop sees only that.

`exactness` is the class that `muster verify` holds a mode to, against one process on the same shards:
    bitwise   every parameter, buffer and loss has the same bits
    tight     gradients are summed in another order: equal within a bound, all else to the bit
    near      sums within the forward and the backward too are taken in another order: equal within what rounding
              makes of such a step
A pipeline is compared with one process that takes the same micro-batches one after another.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from muster.jobs.basics.errors import RefusedError

Sync = Literal["none", "gather_scatter", "allreduce", "flat", "overlap", "bucketed", "ddp", "sharded", "fsdp"]
Zero = Literal[0, 1, 2, 3]
PipelineName = Literal["model", "gpipe", "1f1b", "interleaved", "zb1p", "zbv"]
Exactness = Literal["bitwise", "tight", "near"]


@dataclass(frozen=True)
class Parallel:
    """The degrees of a split: their product is the world size.

    `zero` is the stage of ZeRO: what data-parallel ranks share out instead of each having all of it (1: optimizer
    state, 2: and gradients, 3: and parameters). `sync` says how: `sharded` is ours, `fsdp` PyTorch's. `pipe` ranks
    have a slice of the layers each, and run `microbatches` of a batch in the order of `schedule` ("": no pipeline).
    `tensor` ranks have a part of every layer each.
    """

    data: int = 1
    pipe: int = 1
    tensor: int = 1
    zero: Zero = 0
    sync: Sync = "none"
    schedule: PipelineName | Literal[""] = ""
    microbatches: int = 1
    chunks: int = 1

    @property
    def world_size(self) -> int:
        """Ranks that this split needs."""
        return self.data * self.pipe * self.tensor

    def places(self, rank: int) -> dict[str, int]:
        """Return the place of a rank in every degree above 1, as `pipe.mesh` numbers ranks."""
        at = {
            "pipe": rank // (self.data * self.tensor),
            "data": rank // self.tensor % self.data,
            "tensor": rank % self.tensor,
        }
        return {axis: place for axis, place in at.items() if getattr(self, axis) > 1}


@dataclass(frozen=True)
class Mode:
    """One row: the split it expands to for a world size, what it promises, and what it does in a phrase."""

    name: str
    expand: Callable[[int], Parallel]
    exactness: Callable[[int], Exactness]
    can_be_exact: bool
    phrase: str


def _single(world_size: int) -> Parallel:
    if world_size != 1:
        raise RefusedError(
            f"train.mode: single runs on one rank, this job has {world_size}; set nodes: 1 and ranks_per_node: 1, "
            "or choose a data-parallel mode"
        )
    return Parallel()


def _data_parallel(sync: Sync, zero: Zero = 0) -> Callable[[int], Parallel]:
    return lambda world_size: Parallel(data=world_size, sync=sync, zero=zero)


def _pipeline(schedule: PipelineName) -> Callable[[int], Parallel]:
    return lambda world_size: Parallel(pipe=world_size, schedule=schedule)


def _tensor(world_size: int) -> Parallel:
    return Parallel(tensor=world_size)


def _bitwise_up_to(ranks: float, beyond: Exactness) -> Callable[[int], Exactness]:
    """Return the promise of equal bits for so many ranks, and of less for more."""
    return lambda world_size: "bitwise" if world_size <= ranks else beyond


_BITWISE: Final = _bitwise_up_to(math.inf, "bitwise")
_UP_TO_TWO: Final = _bitwise_up_to(2, "tight")  # a sum in unknown order: a + b commutes, a + b + c does not associate
_ALONE: Final = _bitwise_up_to(1, "tight")  # gradients are divided before they are summed: two ranks may differ
_ALONE_NEAR: Final = _bitwise_up_to(1, "near")  # layers are split: activations are rounded otherwise, and what follows
TENSOR: Final = "tensor"
MODES: Final[dict[str, Mode]] = {
    mode.name: mode
    for mode in (
        Mode("single", _single, _BITWISE, False, "one rank, nothing to synchronize"),
        Mode(
            "gather_scatter",
            _data_parallel("gather_scatter"),
            _BITWISE,
            True,
            "rank 0 gathers every parameter's gradient, averages in rank order, scatters",
        ),
        Mode("allreduce", _data_parallel("allreduce"), _UP_TO_TWO, True, "one all-reduce per parameter"),
        Mode("flat", _data_parallel("flat"), _ALONE, True, "one all-reduce of all gradients"),
        Mode(
            "overlap",
            _data_parallel("overlap"),
            _ALONE,
            True,
            "one all-reduce per parameter, while the backward runs",
        ),
        Mode(
            "bucketed",
            _data_parallel("bucketed"),
            _ALONE,
            True,
            "one all-reduce per bucket, while the backward runs",
        ),
        Mode("ddp", _data_parallel("ddp"), _ALONE, False, "PyTorch's DistributedDataParallel"),
        Mode(
            "zero1",
            _data_parallel("sharded", 1),
            _ALONE,
            True,
            "each rank steps its share of the parameters, and has the optimizer's state for no other",
        ),
        Mode(
            "zero2",
            _data_parallel("sharded", 2),
            _ALONE,
            True,
            "and keeps its share of the gradients alone",
        ),
        Mode(
            "zero3",
            _data_parallel("sharded", 3),
            _ALONE,
            True,
            "and of the parameters, which are gathered block by block when they are needed",
        ),
        Mode("fsdp", _data_parallel("fsdp", 3), _ALONE, False, "PyTorch's fully_shard, block by block"),
        Mode("model", _pipeline("model"), _BITWISE, True, "a slice of the layers on each rank, one at work"),
        Mode("gpipe", _pipeline("gpipe"), _BITWISE, True, "and micro-batches: all forwards, then all backwards"),
        Mode(
            "1f1b",
            _pipeline("1f1b"),
            _BITWISE,
            True,
            "a forward and a backward in turn, which holds no more micro-batches than there are ranks",
        ),
        Mode(
            "interleaved",
            _pipeline("interleaved"),
            _BITWISE,
            True,
            "the same with several slices a rank, for shorter waits at both ends",
        ),
        Mode(
            "zb1p",
            _pipeline("zb1p"),
            _ALONE,
            True,
            "1f1b whose waits are filled with the gradients of weights",
        ),
        Mode(
            "zbv",
            _pipeline("zbv"),
            _ALONE,
            True,
            "the same with two slices a rank, down the ranks and up again",
        ),
        Mode(TENSOR, _tensor, _ALONE_NEAR, False, "a part of every layer on each rank: of a GPT"),
    )
}
SHARDED: Final = tuple(name for name, mode in MODES.items() if mode.expand(1).zero)
PIPELINES: Final = tuple(name for name, mode in MODES.items() if mode.expand(1).schedule)


def mode_of(split: Parallel) -> str:
    """Return the mode that a split which is written out goes by.

    That is its schedule, else that its layers are split, else how it shares gradients.
    """
    wanted = (split.sync, split.zero)
    if split.schedule:
        return split.schedule
    if split.tensor > 1:
        return TENSOR
    return next(name for name, mode in MODES.items() if (mode.expand(1).sync, mode.expand(1).zero) == wanted)
