"""What a rank's memory and network are predicted for: a model, bytes of its elements, and how much of the batch. Pure.

batch ─ shards (ranks, or more where sums are exact) ─ micro-batches of gradient accumulation ─ one forward
"""

from dataclasses import dataclass
from typing import Final, Literal

from muster.collectives_bench.cost.buckets import TORCH_BUCKET
from muster.jobs.models.anatomy import Anatomy

Accumulate = Literal["local", "sharded"]
COUNTER_BYTES: Final = 8  # of each batch norm: how many batches it has seen
LEAST_STATISTICS: Final = 4  # bytes: batch norms stay in float32, whatever the weights are


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


@dataclass(frozen=True)
class Recipe:
    """Bytes a parameter: of itself, its gradient and its optimizer's states, of which `master` is a copy of itself."""

    parameter: int
    gradient: int
    optimizer: int
    master: int = 0

    @classmethod
    def of(cls, optimizer: str, *, momentum: bool, precision: str = "fp32") -> "Recipe":
        """Return the recipe of a job: adamw has two states, momentum one; masters count as the optimizer's."""
        sizes = SIZES[precision]
        states = 2 if optimizer == "adamw" else int(momentum)
        return cls(sizes.weight, sizes.weight, states * sizes.state + sizes.master, sizes.master)


@dataclass(frozen=True)
class Split:
    """How a job's ranks are split, where in more ways than one: the degrees, and what data-parallel ranks do.

    `stages` are the names of each stage's layers; without them stages have nearly equal work.
    """

    data: int = 1
    pipe: int = 1
    tensor: int = 1
    zero: int = 0
    sync: str = "bucketed"
    stages: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Load:
    """What a rank holds it for: the model, and how much of the batch."""

    model: Anatomy
    recipe: Recipe
    ranks: int
    batch: int  # samples of the global batch
    microbatches: int  # of a pipeline
    itemsize: int  # of activations
    backend: str = "gloo"
    bucket_bytes: int | None = TORCH_BUCKET  # of modes with buckets but ddp; None: one holds all
    sent: int | None = None  # bytes of a gradient's element as our own wrappers send it; None: as it is
    shards: int | None = None  # virtual ranks, where sums are exact; None: one a rank
    accumulation: int = 1  # micro-batches of a shard
    accumulate: Accumulate = "local"  # where sharded gradients add up: whole on the rank, or in its shard
    reshard: bool = True  # sharded parameters are freed after the forward, and gathered again
    recompute: bool = False  # blocks are forwarded again in the backward; of pipelines whole stages
    layerwise: bool = False  # of pipelines: layers are, one by one
    sequence: bool = False  # where layers are split: tokens between them, too
    split: Split | None = None  # of pipelines and split layers; None: all ranks are the mode's own

    @property
    def own_batch(self) -> int:
        """The largest part of the batch that a data-parallel rank has."""
        return -(-self.batch // self.ranks)

    @property
    def own_shards(self) -> int:
        """The shards that a data-parallel rank forwards in turn."""
        return 1 if self.shards is None else -(-self.shards // self.ranks)

    @property
    def adds_up(self) -> bool:
        """True when a rank has several backwards in a step."""
        return self.own_shards * self.accumulation > 1

    def at_once(self, ranks: int) -> int:
        """Return the most samples of one forward where so many ranks share the batch."""
        shards = max(ranks, self.shards or 0)
        samples = -(-self.batch // shards)
        return -(-samples // self.accumulation)

    def sent_bytes(self, nbytes: int) -> int:
        """Return what gradients of so many bytes are when our own wrappers send them."""
        return nbytes if self.sent is None else nbytes * self.sent // self.recipe.gradient

    @property
    def buffer_bytes(self) -> int:
        """What batch norms record, and a made model's buffers."""
        own = sum(part.buffer_bytes for part in self.model.parts)
        norms = sum(1 for part in self.model.parts if part.name.startswith("norm") and self.model.buffers)
        return self.model.buffers * max(LEAST_STATISTICS, self.recipe.parameter) + norms * COUNTER_BYTES + own

    @property
    def gradient_sizes(self) -> list[int]:
        """Bytes of every gradient."""
        return [tensor.elements * self.recipe.gradient for tensor in self.model.tensors if tensor.trained]
