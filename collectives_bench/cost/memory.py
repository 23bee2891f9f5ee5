"""What a rank's memory must hold in each mode, in bytes. Pure.

    states        parameters, gradients, optimizer states; ZeRO shards the last (1), the last two (2), all (3)
    buffers       batch norm's statistics; copies for sending, gathered units, what a collective allocates unseen
    activations   what the forward keeps for the backward, and the two largest tensors at work

Mixed-precision Adam has 2 + 2 + 12 bytes a parameter (Rajbhandari et al. 2020): 16 P becomes 4 P + 12 P / N with
ZeRO-1, 2 P + 14 P / N with 2, 16 P / N with 3. DeepSpeed's own estimator counts fp32 gradients too and says 18 where
this says 16: `deepspeed_bytes`. Not counted: the interpreter with torch (300 MB on a CPU), the allocator's slack, a
convolution's scratch memory, NCCL's channels.

What gloo allocates unseen was measured as a share of S (facts of `collectives_bench`): all_gather and gather 1.01,
reduce_scatter 1.03, all_reduce 0.04.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from collectives_bench.cost.buckets import OWN_ALONE, TORCH_BUCKET
from collectives_bench.cost.modes import Stage, Way, cut
from jobs.anatomy import Anatomy, Part, saved_bytes

HIDDEN: Final[dict[str, dict[str, float]]] = {
    "gloo": {"all_gather": 1.01, "gather": 1.01, "reduce_scatter": 1.03, "all_reduce": 0.04}
}
PREFETCHED: Final = 1  # units gathered ahead of the one at work
WHOLE_IN_TENSOR: Final = ("norm1", "norm2", "query", "up")  # parts that keep a norm's input or output: on every rank

Recomputes = Literal["nothing", "selective", "full"]


@dataclass(frozen=True)
class Recipe:
    """Bytes a parameter: of itself, its gradient and its optimizer states."""

    parameter: int
    gradient: int
    optimizer: int

    @classmethod
    def of(cls, optimizer: str, *, momentum: bool, precision: str = "fp32") -> "Recipe":
        """Return the recipe of a job: adamw has two states, momentum one; masters count as the optimizer's."""
        sizes = SIZES[precision]
        states = 2 if optimizer == "adamw" else int(momentum)
        return cls(sizes.weight, sizes.weight, states * sizes.state + sizes.master)


@dataclass(frozen=True)
class Sizes:
    """Bytes of a weight (and its gradient), an optimizer's state, a master, and an activation."""

    weight: int
    state: int
    master: int
    activation: int


SIZES: Final = {
    "fp32": Sizes(4, 4, 0, 4),
    "fp64": Sizes(8, 8, 0, 8),
    "bf16": Sizes(4, 4, 0, 2),
    "fp16": Sizes(4, 4, 0, 2),
    "pure_bf16": Sizes(2, 4, 4, 2),
}
MIXED_ADAM: Final = Recipe(2, 2, 12)


@dataclass(frozen=True)
class Load:
    """What a rank holds it for: the model, and how much of the batch."""

    model: Anatomy
    recipe: Recipe
    ranks: int
    batch: int  # samples of the global batch
    microbatches: int
    itemsize: int  # of activations
    backend: str = "gloo"
    bucket_bytes: int | None = TORCH_BUCKET  # of modes with buckets but ddp; None: one holds all
    sent: int | None = None  # bytes of a gradient's element as our own wrappers send it; None: as it is

    @property
    def own_batch(self) -> int:
        """The largest part of the batch that a data-parallel rank has."""
        return -(-self.batch // self.ranks)

    def sent_bytes(self, nbytes: int) -> int:
        """Return what gradients of so many bytes are when our own wrappers send them."""
        return nbytes if self.sent is None else nbytes * self.sent // self.recipe.gradient


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that needs most."""

    parameters: float
    gradients: float
    optimizer: float
    buffers: float = 0.0
    activations: float = 0.0

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """All of it."""
        return self.states + self.buffers + self.activations


def states(elements: float, recipe: Recipe, *, zero: int = 0, ranks: int = 1) -> Memory:
    """Return the model states of a rank: P (p + g + o), of which ZeRO's stage says what is divided by the ranks."""
    optimizer = elements * recipe.optimizer / (ranks if zero >= 1 else 1)
    gradients = elements * recipe.gradient / (ranks if zero >= 2 else 1)
    return Memory(elements * recipe.parameter / (ranks if zero >= 3 else 1), gradients, optimizer)


def deepspeed_bytes(elements: float, *, zero: int, ranks: int, largest_layer: float = 0.0) -> float:
    """Return what DeepSpeed's estimator says: 2 P + 18 P / N for stage 2, 18 P / N + 4 of the largest layer for 3."""
    if zero == 2:
        return 2 * elements + 18 * elements / ranks
    return 18 * elements / ranks + 4 * largest_layer


def memory_of(way: Way, load: Load) -> Memory | None:
    """Return what the fullest rank of a mode holds; None where the model cannot be split like that."""
    if way.family == "pipe":
        return _pipe(way, load)
    if way.family == "tensor":
        return _tensor(load)
    ranks = 1 if way.family == "single" else load.ranks
    held = states(load.model.elements, load.recipe, zero=way.zero, ranks=ranks)
    samples = load.batch if way.family == "single" else load.own_batch
    return Memory(
        held.parameters,
        held.gradients,
        held.optimizer,
        buffers=load.model.buffers * load.itemsize + (BUFFERS[way.name](load) if ranks > 1 else 0.0),
        activations=samples * (load.model.saved_bytes(load.itemsize) + _working(load.model.parts, load.itemsize)),
    )


def _working(parts: tuple[Part, ...], itemsize: int) -> int:
    """Return the bytes of one sample's largest gradient of an activation, and of the one made from it."""
    return 2 * itemsize * max(part.outputs for part in parts)


def _hidden(load: Load, operation: str) -> float:
    return HIDDEN.get(load.backend, {}).get(operation, 0.0)


def _gradient_bytes(load: Load) -> tuple[int, int]:
    """Return the bytes of all gradients and of the largest one."""
    sizes = [tensor.elements * load.recipe.gradient for tensor in load.model.tensors]
    return sum(sizes), max(sizes)


def _of_gather_scatter(load: Load) -> float:
    """Count rank 0: the stacked gradient, what it gathers, the mean, and the result."""
    largest = _gradient_bytes(load)[1]
    return largest * (3 + load.ranks * (1 + _hidden(load, "gather")))


def _of_allreduce(load: Load) -> float:
    """Count the largest gradient's share, and its copy in another type."""
    return (_hidden(load, "all_reduce") + _message(load)) * _gradient_bytes(load)[1]


def _of_flat(load: Load) -> float:
    """Count the flat tensor that gradients are copied to when all are there."""
    return _gradient_bytes(load)[0] * (1 + _message(load) + _hidden(load, "all_reduce"))


def _of_overlap(load: Load) -> float:
    """Count a gradient on its way into the view that it becomes, and two under way."""
    whole, largest = _gradient_bytes(load)
    return _copied(load, largest) + whole * _message(load) + 2 * largest * _hidden(load, "all_reduce")


def _of_buckets(load: Load) -> float:
    """Count gradients on their way into a bucket, and two buckets under way."""
    whole, largest = _gradient_bytes(load)
    coming = _copied(load, max(largest, _bucket(load)))
    return coming + whole * _message(load) + 2 * _hidden(load, "all_reduce") * _bucket(load)


def _copied(load: Load, together: int) -> float:
    """Return what is there twice while it is copied: on a GPU nothing, but where gradients are cast all that is.

    On CPUs one gradient is copied at a time, and those of 4 MB are sent as they are.
    """
    if load.backend == "nccl":
        return together if _message(load) else 0.0
    sizes = [tensor.elements * load.recipe.gradient for tensor in load.model.tensors]
    return max((size for size in sizes if size < OWN_ALONE), default=0)


def _of_torch(load: Load) -> float:
    """Count two buckets under way; gradients are views of them."""
    return 2 * _hidden(load, "all_reduce") * min(TORCH_BUCKET, _gradient_bytes(load)[0])


def _message(load: Load) -> float:
    """Return the copy of gradients in the type that they are sent as, in bytes for a byte of them."""
    return 0.0 if load.sent in (None, load.recipe.gradient) else load.sent / load.recipe.gradient


def _bucket(load: Load) -> int:
    whole = _gradient_bytes(load)[0]
    return whole if load.bucket_bytes is None else min(load.bucket_bytes, whole)


def _of_zero1(load: Load) -> float:
    """Count the shard of a bucket that is reduced, and what the collectives need for it."""
    return _bucket(load) * (1 / load.ranks + max(_hidden(load, "reduce_scatter"), _hidden(load, "all_gather")))


def _of_zero2(load: Load) -> float:
    """Count two buckets that gradients pass through on top of it."""
    return _of_zero1(load) + 2 * _bucket(load)


def _of_zero3(load: Load) -> float:
    """Count the gathered unit at work and the one ahead, a unit's whole gradient, and the collective's own memory."""
    units = sorted(
        (sum(t.elements for part in unit for t in part.tensors) for unit in load.model.units()), reverse=True
    )
    gathered = sum(units[: 1 + PREFETCHED]) * load.recipe.parameter
    hidden = max(
        _hidden(load, "all_gather") * load.recipe.parameter, _hidden(load, "reduce_scatter") * load.recipe.gradient
    )
    return gathered + units[0] * (load.recipe.gradient + hidden)


BUFFERS: Final[dict[str, Callable[[Load], float]]] = {
    "single": lambda load: 0.0,
    "gather_scatter": _of_gather_scatter,
    "allreduce": _of_allreduce,
    "flat": _of_flat,
    "overlap": _of_overlap,
    "bucketed": _of_buckets,
    "ddp": _of_torch,
    "zero1": _of_zero1,
    "zero2": _of_zero2,
    "zero3": _of_zero3,
    "fsdp": _of_zero3,
}


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
    kept = way.schedule.held(number, load.ranks, count, way.schedule.chunks)
    own = states(stage.elements, load.recipe)
    share = stage.elements / load.model.elements
    return Memory(
        own.parameters,
        own.gradients,
        own.optimizer,
        buffers=load.model.buffers * load.itemsize * share + 2 * micro * load.itemsize * max(stage.outputs),
        activations=micro * (kept * saved_bytes(stage.parts, load.itemsize) + _working(stage.parts, load.itemsize)),
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
        buffers=load.batch * wide * _hidden(load, "all_reduce"),
        activations=load.batch * (kept + 2 * wide),
    )


def layer_activations(
    batch: int,
    tokens: int,
    width: int,
    heads: int,
    *,
    tensor: int = 1,
    sequence: bool = False,
    recompute: Recomputes = "nothing",
) -> float:
    """Return the bytes that one transformer layer keeps at two bytes an element, dropout's masks included.

    s b h (34 + 5 a s / h); with t tensor ranks s b h (10 + 24 / t + 5 a s / (h t)), with their sequence split too all
    of it over t; selective recomputation keeps no (tokens, tokens) matrix, full recomputation the layer's input alone.

    Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", table 2.
    """
    whole = float(batch * tokens * width)
    if recompute == "full":
        return 2 * whole
    square = 0.0 if recompute == "selective" else 5 * heads * tokens / width
    if sequence:
        return whole * (34 + square) / tensor
    return whole * (10 + 24 / tensor + square / tensor)
