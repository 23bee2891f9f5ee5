"""The memory that a rank needs in each mode, in bytes. Pure.

    states          parameters, gradients, optimizer states; ZeRO shards the last (1), the last two (2), all (3)
    buffers         batch norm's statistics
    communication   buffers for gradients and parameters (`collectives_bench/cost/passing.py`), and a pipeline's
                    messages
    activations     tensors that the forward keeps for the backward, and the two largest temporary tensors
    adding          if gradients of several backwards are summed: the largest one, before it is added
    stepping        float32 copies of 16-bit gradients during the optimizer step, when activations are gone

Mixed-precision Adam needs 2 + 2 + 12 bytes per parameter (Rajbhandari et al. 2020): 16 P becomes 4 P + 12 P / N with
ZeRO-1, 2 P + 14 P / N with ZeRO-2, and 16 P / N with ZeRO-3. Muster's zero3 needs 14 P / N, because it keeps no 16-bit
shard beside the master. DeepSpeed's own estimator also counts fp32 gradients, so its sum is 18 instead of 16.

The following is not counted: the interpreter with torch (300 MB on a CPU), the allocator's free memory, NCCL's
channels, and a convolution's scratch memory (oneDNN computes a weight's gradient in its own layout, and copies it).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from muster.collectives_bench.cost.load import RankLoad, Recipe, Split
from muster.collectives_bench.cost.modes import PredictedStage, Way
from muster.collectives_bench.cost.passing import hidden, passing
from muster.collectives_bench.cost.slices import (
    handed_share,
    held_by,
    kept_share,
    message_elements,
    passed_share,
    stages_of,
)
from muster.collectives_bench.sizes import size_text
from muster.jobs.models.anatomy import ModelOperation, saved_bytes

ALONE: Final = Split()
FULL: Final = 4  # bytes per element; the optimizer converts 16-bit gradients to float32


@dataclass(frozen=True)
class PeakMemory:
    """The memory of the rank that needs the most, by purpose, in bytes."""

    parameters: float
    gradients: float
    optimizer: float
    buffers: float = 0.0
    communication: float = 0.0
    activations: float = 0.0
    adding: float = 0.0
    stepping: float = 0.0
    not_kept: float = 0.0  # 16-bit shard of the parameters, which textbooks count but zero3 does not need

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """The largest sum of the parts that are in memory at the same time."""
        return self.states + self.buffers + max(self.communication + self.activations + self.adding, self.stepping)


def states(
    elements: float, recipe: Recipe, *, zero: int = 0, ranks: int = 1, trained: float | None = None
) -> PeakMemory:
    """Return the model states of a rank, P (p + g + o). ZeRO's stage decides which terms are divided by the ranks.

    `trained` is the number of elements with a gradient and optimizer states; None means all.
    """
    learning = elements if trained is None else trained
    optimizer = learning * recipe.optimizer / (ranks if zero >= 1 else 1)
    gradients = learning * recipe.gradient / (ranks if zero >= 2 else 1)
    return PeakMemory(elements * recipe.parameter / (ranks if zero >= 3 else 1), gradients, optimizer)


@dataclass(frozen=True)
class CopiesCost:
    """The cost of checkpoints in memory for a node, in bytes; the mean over the nodes of a pipeline.

    `held`: its own part of the state and that of another node. `most`: while the next copy is made. `sent`: per copy.
    """

    every_steps: int
    held: float
    most: float
    sent: float
    sent_per_step: float


def copies_cost(load: RankLoad, nodes: int, every_steps: int) -> CopiesCost:
    """Return the cost of copies. A checkpoint has every tensor once, whatever the mode, and the nodes share it."""
    held = states(load.model.elements, load.recipe, trained=load.model.trained)
    part = (held.parameters + held.optimizer + load.buffer_bytes) / nodes
    with_other = part * min(nodes, 2)
    sent = part if nodes > 1 else 0.0
    return CopiesCost(every_steps, with_other, 2 * with_other, sent, sent / every_steps)


def memory_of(way: Way, load: RankLoad) -> PeakMemory | None:
    """Return the memory of the rank that needs the most in a mode; None if the model cannot be split for this mode."""
    every = memories_of(way, load)
    return None if every is None else max(every, key=lambda memory: memory.total)


def memories_of(way: Way, load: RankLoad) -> list[PeakMemory] | None:
    """Return the memory of each rank of a pipeline, or of one rank in other modes; None if the model cannot be split.

    `load.split` describes data-parallel pipelines, and split layers within stages.
    """
    if way.family in ("pipe", "tensor"):
        alone = Split(pipe=load.ranks) if way.family == "pipe" else Split(tensor=load.ranks)
        split = load.split or alone
        stages = stages_of(load, split, way.schedule)
        return None if stages is None else [_slice(way, load, split, *each) for each in enumerate(stages)]
    return [_replica(way, load)]


def _replica(way: Way, load: RankLoad) -> PeakMemory:
    ranks = 1 if way.family == "single" else load.ranks
    model = load.model
    held = states(model.elements, load.recipe, zero=way.zero, ranks=ranks, trained=model.trained)
    stored, again = _kept(load, model.parts)
    masters_alone = way.name == "zero3" and load.recipe.master > 0
    return PeakMemory(
        0.0 if masters_alone else held.parameters,
        held.gradients,
        held.optimizer,
        buffers=load.buffer_bytes,
        communication=passing(way.name, load) if ranks > 1 else 0.0,
        activations=load.at_once(ranks) * (stored + again + _working(model.parts, load.itemsize)),
        adding=_adding(load, way.zero),
        stepping=_stepping(load, model.trained / (ranks if way.zero else 1)),
        not_kept=held.parameters if masters_alone else 0.0,
    )


def masters_alone_text(memory: PeakMemory) -> str | None:
    """Explain why the column of parameters shows 0 if a rank keeps only float32 masters; return None in other modes."""
    if not memory.not_kept:
        return None
    return (
        "zero3 shows 0 for parameters: its shard is the float32 masters, counted under optimizer and rounded to\n"
        "16 bits for each gather. In textbooks, a rank also keeps a shard of 2 P / N bytes: parameters "
        f"{size_text(memory.not_kept)}, all states {size_text(memory.states + memory.not_kept)}"
    )


def _adding(load: RankLoad, zero: int) -> float:
    """Return the bytes of a new gradient before it is added to the full sum; 0 if only shards of the sum are kept."""
    whole = zero < 2 or load.accumulate == "local"
    return max(load.gradient_sizes, default=0) if load.adds_up and whole else 0.0


def _stepping(load: RankLoad, elements: float) -> float:
    return FULL * elements if load.recipe.master else 0.0


def _working(parts: tuple[ModelOperation, ...], itemsize: int, split: Split = ALONE) -> float:
    """Return the bytes of one sample's largest activation gradient and of the gradient computed from it."""
    return 2 * itemsize * max(part.outputs * handed_share(part, split) for part in parts)


def _kept(load: RankLoad, parts: Iterable[ModelOperation], split: Split = ALONE) -> tuple[float, float]:
    """Return the bytes per sample that are kept until its backward, and the bytes that recomputation allocates again.

    A block recomputes its forward at the start of its backward; the second number is that of the largest block.
    """

    def kept(some: Iterable[ModelOperation]) -> float:
        return sum(
            saved_bytes([part], load.itemsize) * kept_share(part, split, sequence=load.sequence) for part in some
        )

    own = tuple(parts)
    if not load.recompute:
        return kept(own), 0.0
    stored, again = 0.0, 0.0
    inside = set[str]()
    for block in load.model.recomputed():
        here = [part for part in block.parts if part in own]
        inside |= {part.name for part in here}
        if here:
            stored += block.inputs * load.itemsize
            again = max(again, kept(here))
    return stored + kept(part for part in own if part.name not in inside), again


def _slice(way: Way, load: RankLoad, split: Split, number: int, stage: PredictedStage) -> PeakMemory:
    """Return the memory of a rank that has one stage of the layers, or a part of each layer."""
    count = way.microbatches(load.microbatches) if way.schedule else load.accumulation
    samples = -(-load.batch // split.data)
    micro = -(-samples // count)
    held = way.schedule.held(number, split.pipe, count, way.schedule.chunks) if way.schedule else 1.0
    own = replace(held_by(load, stage, split), accumulation=count, accumulate="local")
    model = own.model
    kept = states(model.elements, load.recipe, zero=split.zero, ranks=split.data, trained=model.trained)
    stored, again = _kept_by_stage(load, stage, split) if way.schedule else _kept(load, stage.parts, split)
    averaged = f"zero{split.zero}" if split.zero else split.sync
    messages = micro * load.itemsize * message_elements(load, stage, split) + micro * _sums(load, split)
    return replace(
        kept,
        buffers=own.buffer_bytes,
        communication=messages + (passing(averaged, own) if split.data > 1 else 0.0),
        activations=micro * (held * stored + again + _working(stage.parts, load.itemsize, split)),
        adding=_adding(own, split.zero),
        stepping=_stepping(load, model.trained / (split.data if split.zero else 1)),
    )


def _kept_by_stage(load: RankLoad, stage: PredictedStage, split: Split) -> tuple[float, float]:
    """Return the bytes that a stage keeps per sample, and the largest number that recomputation restores at once."""
    share = load.itemsize * passed_share(load, split)
    kept, _ = _kept(replace(load, recompute=False), stage.parts, split)
    if load.recompute:
        return share * stage.received, kept / len(stage.outputs)  # all chunks have nearly equal work
    return kept + share * stage.unkept, 0.0


def _sums(load: RankLoad, split: Split) -> float:
    """Return the bytes per sample that the backend allocates to sum the outputs of split layers."""
    wide = load.model.tokens * load.model.width * load.itemsize
    return wide * hidden(load, "all_reduce") if split.tensor > 1 else 0.0
