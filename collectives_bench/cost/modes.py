"""The table of all modes that can be predicted, including designed modes without code yet. Pure.

Pipelines, with p stages, m micro-batches and v chunks a stage; F, B and W (the weights' part of the backward) take
equally long. So every rank is idle for a share of its time:

    schedule       idle share                 micro-batches that stage i holds      messages on a boundary
    model          (p - 1) / p                1                                     1 each way
    gpipe          (p - 1) / (m + p - 1)      m                                     m
    1f1b           (p - 1) / (m + p - 1)      min(p - i, m)                         m
    interleaved    (p - 1) / (v m + p - 1)    min(2 (p - i - 1) + (v - 1) p + 1, v m) / v      v m
    zb1p           (p - 1) / (3 m + p - 1)    min(p, m)                             m
    zbv            0                          min(p, m)                             2 m

Sources: Huang et al. 2019 (GPipe), Narayanan et al. 2021 (1F1B, interleaved), Qi et al. 2024 (zero bubble).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from muster.jobs.basics.errors import UsageError
from muster.jobs.basics.words import unknown
from muster.jobs.models.anatomy import Anatomy, Part
from muster.jobs.models.counted import CountedPart
from muster.jobs.spec.modes import MODES

Family = Literal["single", "data", "pipe", "tensor"]
Idle = Callable[[int, int, int], float]  # stages, micro-batches, chunks a stage -> share of the time
Held = Callable[[int, int, int, int], float]  # stage, stages, micro-batches, chunks -> micro-batches


@dataclass(frozen=True)
class Schedule:
    """How a pipeline's ranks take turns."""

    idle: Idle
    held: Held
    chunks: int = 1  # pieces of the model on each rank
    turns_back: bool = False  # chunks go down the ranks and up again, so that rank 0 has the first and the last
    splits_batch: bool = True


@dataclass(frozen=True)
class Way:
    """A mode in the cost model; `zero` is the stage of ZeRO (1: states sharded, 2: and gradients, 3: everything)."""

    name: str
    family: Family
    phrase: str
    zero: int = 0
    schedule: Schedule | None = None

    @property
    def is_built(self) -> bool:
        """True when jobs can be run in it."""
        return self.name in MODES

    def microbatches(self, wanted: int) -> int:
        """Return the number of micro-batches into which it cuts a batch."""
        return 1 if self.schedule is None or not self.schedule.splits_batch else wanted


@dataclass(frozen=True)
class Stage:
    """The part of a model on one rank of a pipeline."""

    parts: tuple[Part, ...]
    outputs: tuple[int, ...]  # elements of one sample that each of its chunks passes on
    sent: int = 0  # of those, elements that go to other ranks
    received: int = 0  # elements of one sample that all of its chunks receive from other ranks
    unkept: int = 0  # received elements that no part counts as kept

    @property
    def elements(self) -> int:
        """Its parameters."""
        return sum(tensor.elements for part in self.parts for tensor in part.tensors)

    @property
    def flops(self) -> int:
        """Floating-point operations of forward and backward for one sample."""
        return sum(part.flops + part.backward_flops for part in self.parts)


_GPIPE: Final = Schedule(lambda p, m, v: (p - 1) / (m + p - 1), lambda i, p, m, v: float(m))
_1F1B: Final = Schedule(_GPIPE.idle, lambda i, p, m, v: float(min(p - i, m)))
_INTERLEAVED: Final = Schedule(
    lambda p, m, v: (p - 1) / (v * m + p - 1),
    lambda i, p, m, v: min(2 * (p - i - 1) + (v - 1) * p + 1, v * m) / v,
    chunks=2,
)
_MODEL: Final = Schedule(lambda p, m, v: (p - 1) / p, lambda i, p, m, v: 1.0, splits_batch=False)
_ZB1P: Final = Schedule(lambda p, m, v: (p - 1) / (3 * m + p - 1), lambda i, p, m, v: float(min(p, m)))
_ZBV: Final = Schedule(lambda p, m, v: 0.0, _ZB1P.held, chunks=2, turns_back=True)

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
        Way("model", "pipe", "layers on ranks, one after another", schedule=_MODEL),
        Way("gpipe", "pipe", "all forwards, then all backwards", schedule=_GPIPE),
        Way("1f1b", "pipe", "forwards and backwards in turn", schedule=_1F1B),
        Way("interleaved", "pipe", "1f1b over two chunks a rank", schedule=_INTERLEAVED),
        Way("zb1p", "pipe", "weights' gradients fill the ramps", schedule=_ZB1P),
        Way("zbv", "pipe", "chunks down and up the ranks, no idle time", schedule=_ZBV),
        Way("tensor", "tensor", "every matrix cut over the ranks"),
    )
}


def ways(names: Sequence[str] | None = None) -> list[Way]:
    """Return modes by name, in the order of the table; all without names.

    Raises:
        UsageError: no mode has that name.
    """
    for name in names or ():
        if name not in WAYS:
            raise UsageError(f"--modes: {unknown('mode', name, tuple(WAYS))}")
    return [way for name, way in WAYS.items() if not names or name in names]


def cut(model: Anatomy, schedule: Schedule, stages: int, names: Sequence[Sequence[str]] = ()) -> list[Stage] | None:
    """Cut a model between its layers into stages of nearly equal work; None if it has too few layers.

    `names` lists the layers of every chunk if the cuts are given. Returns the stage of each rank.
    """
    layers = [parts for _, parts in model.layers()]
    count = stages * schedule.chunks
    if count > len(layers):
        return None
    own = [tuple(part for part in model.parts if part.layer in chunk) for chunk in names]
    chunks = own if len(own) == count and all(own) else _balanced(layers, count)
    ranks: list[list[tuple[Part, ...]]] = [[] for _ in range(stages)]
    passed = [[0, 0, 0] for _ in range(stages)]  # sent, received, unkept
    for number, chunk in enumerate(chunks):
        rank, before = rank_of(number, schedule, stages), rank_of(max(number - 1, 0), schedule, stages)
        ranks[rank].append(chunk)
        if rank != before:
            size = chunks[number - 1][-1].outputs
            passed[before][0] += size
            passed[rank][1] += size
            passed[rank][2] += 0 if _counts_its_input(model, chunk[0]) else size
    return [
        Stage(tuple(part for chunk in own for part in chunk), tuple(chunk[-1].outputs for chunk in own), *each)
        for own, each in zip(ranks, passed, strict=True)
    ]


def _counts_its_input(model: Anatomy, part: Part) -> bool:
    """True if a part counts its input as kept: all of a GPT's layers, only the norms of a VGG (`anatomy.py`)."""
    if isinstance(part, CountedPart):
        return part.keeps_input
    return bool(model.width) or part.name.startswith("norm")


def rank_of(chunk: int, schedule: Schedule, stages: int) -> int:
    """Return the rank that holds a chunk: 0 1 2 3 0 1 2 3, or there and back 0 1 2 3 3 2 1 0."""
    turn, place = divmod(chunk, stages)
    return stages - 1 - place if schedule.turns_back and turn % 2 else place


def messages(stages: Sequence[Stage], schedule: Schedule) -> list[int]:
    """List the elements of one sample that go from rank to rank in a forward, chunk by chunk."""
    count = len(stages)
    holders = [rank_of(chunk, schedule, count) for chunk in range(count * schedule.chunks)]
    return [
        stages[here].outputs[chunk // count] for chunk, (here, there) in enumerate(pairwise(holders)) if here != there
    ]


def _balanced(layers: Sequence[tuple[Part, ...]], count: int) -> list[tuple[Part, ...]]:
    """Cut layers into `count` runs so that the greatest work of a run is the least possible."""
    work = [sum(part.flops + part.backward_flops for part in layer) for layer in layers]
    before = [0]
    for each in work:
        before.append(before[-1] + each)
    # best[k][j]: for the first j layers in k runs, the smallest possible greatest work, and the last run's first layer
    best: list[list[tuple[float, int]]] = [[(0.0 if j == 0 else float("inf"), 0) for j in range(len(work) + 1)]]
    for k in range(1, count + 1):
        row = [(float("inf"), 0)] * (len(work) + 1)
        for j in range(k, len(work) + 1):
            row[j] = min((max(best[k - 1][i][0], before[j] - before[i]), i) for i in range(k - 1, j))
        best.append(row)
    runs, end = list[tuple[Part, ...]](), len(layers)
    for k in range(count, 0, -1):
        begin = best[k][end][1]
        runs.append(tuple(part for layer in layers[begin:end] for part in layer))
        end = begin
    return runs[::-1]
