"""What a rank's memory must hold in each mode, in bytes. Pure.

    states          parameters, gradients, optimizer states; ZeRO shards the last (1), the last two (2), all (3)
    buffers         batch norm's statistics
    communication   what gradients and parameters pass through: `collectives_bench/cost/passing.py`
    activations     what the forward keeps for the backward, and the two largest tensors at work
    stepping        float32 copies of 16-bit gradients, while the optimizer steps; activations are gone by then

Mixed-precision Adam has 2 + 2 + 12 bytes a parameter (Rajbhandari et al. 2020): 16 P becomes 4 P + 12 P / N with
ZeRO-1, 2 P + 14 P / N with 2, 16 P / N with 3; our zero3 keeps no 16-bit shard beside its master, 14 P / N. DeepSpeed's
own estimator counts fp32 gradients too and says 18 where this says 16: `collectives_bench/cost/known.py`.

Not counted: the interpreter with torch (300 MB on a CPU), the allocator's slack, a convolution's scratch memory,
NCCL's channels.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from collectives_bench.cost.load import Load, Recipe
from collectives_bench.cost.modes import Stage, Way, cut
from collectives_bench.cost.passing import hidden, passing
from jobs.anatomy import Part, saved_bytes

WHOLE_IN_TENSOR: Final = ("norm1", "norm2", "query", "up")  # parts that keep a norm's input or output: on every rank
FULL: Final = 4  # bytes of the numbers that 16-bit gradients are stepped in


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that needs most."""

    parameters: float
    gradients: float
    optimizer: float
    buffers: float = 0.0
    communication: float = 0.0
    activations: float = 0.0
    stepping: float = 0.0

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """All of it that is there at once."""
        return self.states + self.buffers + max(self.communication + self.activations, self.stepping)


def states(elements: float, recipe: Recipe, *, zero: int = 0, ranks: int = 1) -> Memory:
    """Return the model states of a rank: P (p + g + o), of which ZeRO's stage says what is divided by the ranks."""
    optimizer = elements * recipe.optimizer / (ranks if zero >= 1 else 1)
    gradients = elements * recipe.gradient / (ranks if zero >= 2 else 1)
    return Memory(elements * recipe.parameter / (ranks if zero >= 3 else 1), gradients, optimizer)


def memory_of(way: Way, load: Load) -> Memory | None:
    """Return what the fullest rank of a mode holds; None where the model cannot be split like that."""
    if way.family == "pipe":
        return _pipe(way, load)
    if way.family == "tensor":
        return _tensor(load)
    ranks = 1 if way.family == "single" else load.ranks
    held = states(load.model.elements, load.recipe, zero=way.zero, ranks=ranks)
    stored, again = _kept(load, load.model.parts)
    return Memory(
        0.0 if way.name == "zero3" and load.recipe.master else held.parameters,
        held.gradients,
        held.optimizer,
        buffers=load.buffer_bytes,
        communication=passing(way.name, load) if ranks > 1 else 0.0,
        activations=load.at_once(ranks) * (stored + again + _working(load.model.parts, load.itemsize)),
        stepping=_stepping(load, load.model.elements / (ranks if way.zero else 1)),
    )


def _stepping(load: Load, elements: float) -> float:
    return FULL * elements if load.recipe.master else 0.0


def _working(parts: tuple[Part, ...], itemsize: int) -> int:
    """Return the bytes of one sample's largest gradient of an activation, and of the one made from it."""
    return 2 * itemsize * max(part.outputs for part in parts)


def _kept(load: Load, parts: Iterable[Part]) -> tuple[int, int]:
    """Return what parts keep of a sample until its backward, and what comes back while a block is forwarded again."""
    own = tuple(parts)
    if not load.recompute:
        return saved_bytes(own, load.itemsize), 0
    stored, again = 0, 0
    inside = set[str]()
    for block in load.model.recomputed():
        here = [part for part in block.parts if part in own]
        inside |= {part.name for part in here}
        if here:
            stored += block.inputs * load.itemsize
            again = max(again, saved_bytes(here, load.itemsize))
    return stored + saved_bytes((part for part in own if part.name not in inside), load.itemsize), again


def _pipe(way: Way, load: Load) -> Memory | None:
    assert way.schedule is not None
    stages = cut(load.model, way.schedule, load.ranks)
    if stages is None:
        return None
    held = [_stage(way, load, number, stage) for number, stage in enumerate(stages)]
    return max(held, key=lambda memory: memory.total)


def _stage(way: Way, load: Load, number: int, stage: Stage) -> Memory:
    assert way.schedule is not None
    count = way.microbatches(load.microbatches)
    micro = -(-load.batch // count)
    held = way.schedule.held(number, load.ranks, count, way.schedule.chunks)
    own = states(stage.elements, load.recipe)
    stored, again = _kept(load, stage.parts)
    return Memory(
        own.parameters,
        own.gradients,
        own.optimizer,
        buffers=load.buffer_bytes * stage.elements / load.model.elements,
        communication=2 * micro * load.itemsize * max(stage.outputs),
        activations=micro * (held * stored + again + _working(stage.parts, load.itemsize)),
        stepping=_stepping(load, stage.elements),
    )


def _tensor(load: Load) -> Memory | None:
    """Count matrices and what they keep divided by the ranks, norms and the residual stream in full."""
    if not load.model.width:
        return None
    kept = sum(
        saved_bytes([part], load.itemsize) / (1 if part.name.endswith(WHOLE_IN_TENSOR) else load.ranks)
        for part in load.model.parts
    )
    own = states(load.model.elements / load.ranks, load.recipe)
    wide = load.model.tokens * load.model.width * load.itemsize  # what is all-reduced
    return Memory(
        own.parameters,
        own.gradients,
        own.optimizer,
        communication=load.batch * wide * hidden(load, "all_reduce"),
        activations=load.batch * (kept + 2 * wide),
        stepping=_stepping(load, load.model.elements / load.ranks),
    )
