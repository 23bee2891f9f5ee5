"""The table of all modes, for predictions. Pure.

For pipelines, with p stages, m micro-batches, v chunks per stage, and equal times of F, B and W (the weights' part of
the backward), every rank is idle for a share of its time:

    schedule       idle share                 micro-batches that stage i holds      messages on a boundary
    model          (p - 1) / p                1                                     1 each way
    gpipe          (p - 1) / (m + p - 1)      m                                     m
    1f1b           (p - 1) / (m + p - 1)      min(p - i, m)                         m
    interleaved    (p - 1) / (v m + p - 1)    min(2 (p - i - 1) + (v - 1) p + 1, v m) / v      v m
    zb1p           (p - 1) / (3 m + p - 1)    min(p, m)                             m
    zbv            0                          min(p, m)                             2 m
    terapipe       (p - 1) / (s m + p - 1)    m                                     s m

terapipe cuts sequences into s slices, 4 by default. Sources: Huang et al. 2019 (GPipe), Narayanan et al. 2021
(1F1B, interleaved), Qi et al. 2024 (zero bubble), Li et al. 2021 (TeraPipe).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Final, Literal

from muster.jobs.basics.errors import UsageError
from muster.jobs.basics.words import unknown
from muster.jobs.models.anatomy import Anatomy, ModelOperation, layer_weight
from muster.jobs.models.counted import CountedPart
from muster.pipe.schedules.cuts import balanced_ranks
from muster.pipe.schedules.tables import SLICES

Family = Literal["single", "data", "pipe", "tensor"]
Idle = Callable[[int, int, int], float]  # (stages, micro-batches, chunks per stage) -> idle share of the time
Held = Callable[[int, int, int, int], float]  # (stage, stages, micro-batches, chunks) -> micro-batches held


@dataclass(frozen=True)
class TurnOrder:
    """The schedule of a pipeline's ranks."""

    idle: Idle
    held: Held
    chunks: int = 1  # number of model parts on each rank
    turns_back: bool = False  # True: chunks are placed along the ranks and back; rank 0 has the first and last
    splits_batch: bool = True


@dataclass(frozen=True)
class Way:
    """A mode in the cost model. `zero` is the ZeRO stage: 1 shards states, 2 also gradients, 3 also parameters."""

    name: str
    family: Family
    phrase: str
    zero: int = 0
    schedule: TurnOrder | None = None

    def microbatches(self, wanted: int) -> int:
        """Return the number of micro-batches into which this mode divides a batch."""
        return 1 if self.schedule is None or not self.schedule.splits_batch else wanted


@dataclass(frozen=True)
class PredictedStage:
    """The part of a model on one rank of a pipeline."""

    parts: tuple[ModelOperation, ...]
    outputs: tuple[int, ...]  # by chunk: elements of one sample that it passes to the next chunk
    sent: int = 0  # number of these elements that go to other ranks
    received: int = 0  # elements of one sample that its chunks receive from other ranks
    unkept: int = 0  # received elements that no part of the model counts as kept for the backward

    @property
    def elements(self) -> int:
        """Its parameters."""
        return sum(tensor.elements for part in self.parts for tensor in part.tensors)

    @property
    def flops(self) -> int:
        """The floating-point operations of forward and backward for one sample."""
        return sum(part.flops + part.backward_flops for part in self.parts)


_GPIPE: Final = TurnOrder(lambda p, m, v: (p - 1) / (m + p - 1), lambda i, p, m, v: float(m))
_1F1B: Final = TurnOrder(_GPIPE.idle, lambda i, p, m, v: float(min(p - i, m)))
_INTERLEAVED: Final = TurnOrder(
    lambda p, m, v: (p - 1) / (v * m + p - 1),
    lambda i, p, m, v: min(2 * (p - i - 1) + (v - 1) * p + 1, v * m) / v,
    chunks=2,
)
_MODEL: Final = TurnOrder(lambda p, m, v: (p - 1) / p, lambda i, p, m, v: 1.0, splits_batch=False)
_ZB1P: Final = TurnOrder(lambda p, m, v: (p - 1) / (3 * m + p - 1), lambda i, p, m, v: float(min(p, m)))
_TERAPIPE: Final = TurnOrder(lambda p, m, v: (p - 1) / (SLICES * m + p - 1), _GPIPE.held)
_ZBV: Final = TurnOrder(lambda p, m, v: 0.0, _ZB1P.held, chunks=2, turns_back=True)

WAYS: Final[dict[str, Way]] = {
    way.name: way
    for way in (
        Way("single", "single", "one rank with the whole batch"),
        Way("gather_scatter", "data", "gather and scatter of every gradient through rank 0"),
        Way("allreduce", "data", "one all-reduce for each gradient, after the backward"),
        Way("flat", "data", "one all-reduce of all gradients, after the backward"),
        Way("overlap", "data", "one all-reduce for each gradient, during the backward"),
        Way("bucketed", "data", "one all-reduce for each bucket, during the backward"),
        Way("ddp", "data", "PyTorch's DistributedDataParallel: buckets of 25 MB, the first of 1 MB"),
        Way("zero1", "data", "optimizer states sharded", zero=1),
        Way("zero2", "data", "and gradients", zero=2),
        Way("zero3", "data", "and parameters, gathered unit by unit", zero=3),
        Way("fsdp", "data", "PyTorch's fully_shard on every layer", zero=3),
        Way("model", "pipe", "consecutive layers on each rank, one rank at a time", schedule=_MODEL),
        Way("gpipe", "pipe", "all forwards, then all backwards", schedule=_GPIPE),
        Way("1f1b", "pipe", "forward and backward passes alternate", schedule=_1F1B),
        Way("interleaved", "pipe", "1f1b with two chunks per rank", schedule=_INTERLEAVED),
        Way("zb1p", "pipe", "weight gradients fill the idle times", schedule=_ZB1P),
        Way("zbv", "pipe", "two chunks per rank in V shape, no idle time", schedule=_ZBV),
        Way("terapipe", "pipe", f"gpipe over {SLICES} slices of every sequence", schedule=_TERAPIPE),
        Way("tensor", "tensor", "every matrix split across the ranks"),
    )
}


def ways(names: Sequence[str] | None = None) -> list[Way]:
    """Return the named modes in the order of the table; without names, all modes.

    Raises:
        UsageError: if no mode has one of the names.
    """
    for name in names or ():
        if name not in WAYS:
            raise UsageError(f"--modes: {unknown('mode', name, tuple(WAYS))}")
    return [way for name, way in WAYS.items() if not names or name in names]


def cut(
    model: Anatomy, schedule: TurnOrder, stages: int, names: Sequence[Sequence[str]] = ()
) -> list[PredictedStage] | None:
    """Cut a model between layers into one stage per rank, as a job does by default; None if it has too few layers.

    `names` lists the layers of every chunk, if the cuts are given.
    """
    count = stages * schedule.chunks
    if count > len(list(model.layers())):
        return None
    own = [tuple(part for part in model.parts if part.layer in chunk) for chunk in names]
    chunks = own if len(own) == count and all(own) else chunks_of(model, schedule, stages)
    ranks: list[list[tuple[ModelOperation, ...]]] = [[] for _ in range(stages)]
    passed = [[0, 0, 0] for _ in range(stages)]  # numbers of elements sent, received, and received but not kept
    for number, chunk in enumerate(chunks):
        rank, before = rank_of(number, schedule, stages), rank_of(max(number - 1, 0), schedule, stages)
        ranks[rank].append(chunk)
        if rank != before:
            size = chunks[number - 1][-1].outputs
            passed[before][0] += size
            passed[rank][1] += size
            passed[rank][2] += 0 if _counts_its_input(model, chunk[0]) else size
    return [
        PredictedStage(tuple(part for chunk in own for part in chunk), tuple(chunk[-1].outputs for chunk in own), *each)
        for own, each in zip(ranks, passed, strict=True)
    ]


def _counts_its_input(model: Anatomy, part: ModelOperation) -> bool:
    """Return True if a layer counts its input as kept: in a GPT all layers do, in a VGG only norms (`anatomy.py`)."""
    if isinstance(part, CountedPart):
        return part.keeps_input
    return bool(model.width) or part.name.startswith("norm")


def rank_of(chunk: int, schedule: TurnOrder, stages: int) -> int:
    """Return the rank that has a chunk, in the order 0 1 2 3 0 1 2 3 or, if it turns back, 0 1 2 3 3 2 1 0."""
    turn, place = divmod(chunk, stages)
    return stages - 1 - place if schedule.turns_back and turn % 2 else place


def messages(stages: Sequence[PredictedStage], schedule: TurnOrder) -> list[int]:
    """List by chunk the number of elements of one sample that go to another rank in a forward."""
    count = len(stages)
    holders = [rank_of(chunk, schedule, count) for chunk in range(count * schedule.chunks)]
    return [
        stages[here].outputs[chunk // count] for chunk, (here, there) in enumerate(pairwise(holders)) if here != there
    ]


def chunks_of(model: Anatomy, schedule: TurnOrder, stages: int) -> list[tuple[ModelOperation, ...]]:
    """Cut a model between layers by their work, as `jobs/train/parallel/cutting.py` does by default."""
    layers = [parts for _, parts in model.layers()]
    ranks = tuple(rank_of(chunk, schedule, stages) for chunk in range(stages * schedule.chunks))
    cuts = _first_layers(tuple(layer_weight("flops", layer) for layer in layers), ranks)
    return [tuple(part for layer in layers[begin:end] for part in layer) for begin, end in pairwise((*cuts, None))]


_first_layers = cache(balanced_ranks)
