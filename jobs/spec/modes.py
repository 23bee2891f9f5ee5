"""The modes: ways to split training over ranks. Each is a row of a table, and expands to one frozen `Parallel`.

`exactness` is the agreement with one process on the same shards that `muster verify` demands of a mode:
    bitwise   every parameter, buffer and loss has the same bits
    tight     gradients are summed in another order: they agree within a bound, and everything else is bitwise equal
    near      sums within the forward and backward are also taken in another order: they agree within the rounding
              error of such a step
A pipeline is compared with one process that runs the same micro-batches one after another.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from muster.jobs.basics.errors import RefusedError

Sync = Literal[
    "none",
    "gather_scatter",
    "allreduce",
    "flat",
    "overlap",
    "bucketed",
    "ddp",
    "sharded",
    "fsdp",
]
Zero = Literal[0, 1, 2, 3]
PipelineName = Literal["model", "gpipe", "1f1b", "interleaved", "zb1p", "zbv", "terapipe"]
Exactness = Literal["bitwise", "tight", "near"]


@dataclass(frozen=True)
class Parallel:
    """The degrees of a split. Their product is the world size.

    `zero` is the ZeRO stage: data-parallel ranks shard state instead of replicating it (1: optimizer state, 2: also
    gradients, 3: also parameters). `sync` is the way to average gradients; with ZeRO, `sharded` is Muster's
    implementation and `fsdp` is PyTorch's. Each of the `pipe` ranks has a slice of the layers, and runs `microbatches`
    of a batch in the order of `schedule` ("": no pipeline). Each of the `tensor` ranks has a part of every layer.
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
        """The number of ranks that this split needs."""
        return self.data * self.pipe * self.tensor

    def places(self, rank: int) -> dict[str, int]:
        """Return the index of a rank along every axis with several ranks. Ranks are numbered as in `pipe.mesh`."""
        at = {
            "pipe": rank // (self.data * self.tensor),
            "data": rank // self.tensor % self.data,
            "tensor": rank % self.tensor,
        }
        return {axis: place for axis, place in at.items() if getattr(self, axis) > 1}


@dataclass(frozen=True)
class Mode:
    """One mode: functions from the world size to its split and to its exactness, and a phrase that describes it."""

    name: str
    expand: Callable[[int], Parallel]
    exactness: Callable[[int], Exactness]
    can_be_exact: bool
    phrase: str


def _single(world_size: int) -> Parallel:
    if world_size != 1:
        raise RefusedError(
            f"train.mode: single runs on one rank, but this job has {world_size}; set nodes: 1 and "
            "ranks_per_node: 1, or choose a mode with several ranks, such as ddp"
        )
    return Parallel()


def _data_parallel(sync: Sync, zero: Zero = 0) -> Callable[[int], Parallel]:
    return lambda world_size: Parallel(data=world_size, sync=sync, zero=zero)


def _pipeline(schedule: PipelineName) -> Callable[[int], Parallel]:
    return lambda world_size: Parallel(pipe=world_size, schedule=schedule)


def _tensor(world_size: int) -> Parallel:
    return Parallel(tensor=world_size)


def _bitwise_up_to(ranks: float, beyond: Exactness) -> Callable[[int], Exactness]:
    """Return an exactness that is bitwise for at most `ranks` ranks, and `beyond` for more."""
    return lambda world_size: "bitwise" if world_size <= ranks else beyond


_BITWISE: Final = _bitwise_up_to(math.inf, "bitwise")
_UP_TO_TWO: Final = _bitwise_up_to(2, "tight")  # the order of sums is unknown, but does not matter for two values
_ALONE: Final = _bitwise_up_to(1, "tight")  # gradients are divided before they are summed, so two ranks may differ
_ALONE_NEAR: Final = _bitwise_up_to(1, "near")  # split layers already round activations differently
_NEAR: Final = _bitwise_up_to(0, "near")
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
            "rank 0 gathers every parameter's gradient, averages it in rank order, and scatters the mean",
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
            "each rank updates its share of the parameters and keeps only their optimizer state",
        ),
        Mode(
            "zero2",
            _data_parallel("sharded", 2),
            _ALONE,
            True,
            "zero1, and each rank keeps only its share of the gradients",
        ),
        Mode(
            "zero3",
            _data_parallel("sharded", 3),
            _ALONE,
            True,
            "zero2, and each rank keeps only its share of the parameters, gathered block by block when needed",
        ),
        Mode("fsdp", _data_parallel("fsdp", 3), _ALONE, False, "PyTorch's fully_shard, block by block"),
        Mode("model", _pipeline("model"), _BITWISE, True, "slices of the layers on the ranks, one active at a time"),
        Mode("gpipe", _pipeline("gpipe"), _BITWISE, True, "in micro-batches: all forwards, then all backwards"),
        Mode(
            "1f1b",
            _pipeline("1f1b"),
            _BITWISE,
            True,
            "alternates a forward and a backward, so a rank holds at most as many micro-batches as there are ranks",
        ),
        Mode(
            "interleaved",
            _pipeline("interleaved"),
            _BITWISE,
            True,
            "1f1b with several slices per rank, for less idle time at both ends",
        ),
        Mode(
            "zb1p",
            _pipeline("zb1p"),
            _ALONE,
            True,
            "1f1b that computes the gradients of weights in idle time",
        ),
        Mode(
            "zbv",
            _pipeline("zbv"),
            _ALONE,
            True,
            "zb1p with two slices per rank; the second slices run in reverse order of ranks",
        ),
        Mode(
            "terapipe",
            _pipeline("terapipe"),
            _NEAR,
            False,
            "gpipe with the sequences of a GPT cut into slices, which run through the ranks one after another",
        ),
        Mode(TENSOR, _tensor, _ALONE_NEAR, False, "a part of every layer of a GPT on each rank"),
    )
}
SHARDED: Final = tuple(name for name, mode in MODES.items() if mode.expand(1).zero)
PIPELINES: Final = tuple(name for name, mode in MODES.items() if mode.expand(1).schedule)


def mode_of(split: Parallel) -> str:
    """Return the mode whose rules apply to a split given by `parallel:`.

    That is its schedule if it has one, else `tensor` if layers are split, else the mode with the same `sync` and
    `zero`.
    """
    wanted = (split.sync, split.zero)
    if split.schedule:
        return split.schedule
    if split.tensor > 1:
        return TENSOR
    return next(name for name, mode in MODES.items() if (mode.expand(1).sync, mode.expand(1).zero) == wanted)
