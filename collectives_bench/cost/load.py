"""A rank's load, from which memory and network times are predicted: a model, element sizes, part of the batch. Pure.

batch ─ shards (ranks, or more where sums are exact) ─ micro-batches of gradient accumulation ─ one forward
"""

from dataclasses import dataclass
from typing import Final, Literal

from muster.collectives_bench.cost.buckets import TORCH_BUCKET
from muster.jobs.models.anatomy import Anatomy

Accumulate = Literal["local", "sharded"]
COUNTER_BYTES: Final = 8  # each batch norm's count of batches
LEAST_STATISTICS: Final = 4  # bytes: batch norms stay in float32 with weights of any type


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
    """Bytes for each parameter: its value, its gradient and its optimizer states; `master`, a copy, is one of them."""

    parameter: int
    gradient: int
    optimizer: int
    master: int = 0

    @classmethod
    def of(cls, optimizer: str, *, momentum: bool, precision: str = "fp32") -> "Recipe":
        """Return the recipe of a job: adamw has two states, momentum one; master weights count as states."""
        sizes = SIZES[precision]
        states = 2 if optimizer == "adamw" else int(momentum)
        return cls(sizes.weight, sizes.weight, states * sizes.state + sizes.master, sizes.master)


@dataclass(frozen=True)
class Split:
    """How ranks are split in several dimensions at once: the degrees, and the mode of the data-parallel ranks.

    `stages` lists the names of each stage's layers; if empty, stages have nearly equal work.
    """

    data: int = 1
    pipe: int = 1
    tensor: int = 1
    zero: int = 0
    sync: str = "bucketed"
    stages: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Load:
    """A rank's load: the model, its part of the batch, and the settings that change memory or traffic."""

    model: Anatomy
    recipe: Recipe
    ranks: int
    batch: int  # samples of the global batch
    microbatches: int  # of a pipeline
    itemsize: int  # of activations
    backend: str = "gloo"
    bucket_bytes: int | None = TORCH_BUCKET  # of modes with buckets except ddp; None: one bucket
    sent: int | None = None  # bytes of a gradient's element as our own wrappers send it; None: unchanged
    shards: int | None = None  # virtual ranks of exact sums; None: one for each rank
    accumulation: int = 1  # micro-batches of a shard
    accumulate: Accumulate = "local"  # sharded gradients are summed whole on the rank, or in its shard
    reshard: bool = True  # sharded parameters are freed after the forward, and gathered again
    recompute: bool = False  # the forward is repeated in the backward, of each block or each pipeline stage
    layerwise: bool = False  # in pipelines: of each layer instead
    sequence: bool = False  # split layers: tokens between them are split, too
    split: Split | None = None  # of pipelines and split layers; None: the mode uses all ranks

    @property
    def own_batch(self) -> int:
        """The samples of the data-parallel rank with the largest part of the batch."""
        return -(-self.batch // self.ranks)

    @property
    def own_shards(self) -> int:
        """How many shards a data-parallel rank processes one after another."""
        return 1 if self.shards is None else -(-self.shards // self.ranks)

    @property
    def adds_up(self) -> bool:
        """True when a rank has several backwards in a step."""
        return self.own_shards * self.accumulation > 1

    def at_once(self, ranks: int) -> int:
        """Return the largest number of samples in one forward if `ranks` ranks share the batch."""
        shards = max(ranks, self.shards or 0)
        samples = -(-self.batch // shards)
        return -(-samples // self.accumulation)

    def sent_bytes(self, nbytes: int) -> int:
        """Return the bytes that our own wrappers send for gradients of `nbytes` bytes."""
        return nbytes if self.sent is None else nbytes * self.sent // self.recipe.gradient

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the batch norms' statistics and of a made model's buffers."""
        own = sum(part.buffer_bytes for part in self.model.parts)
        norms = sum(1 for part in self.model.parts if part.name.startswith("norm") and self.model.buffers)
        return self.model.buffers * max(LEAST_STATISTICS, self.recipe.parameter) + norms * COUNTER_BYTES + own

    @property
    def gradient_sizes(self) -> list[int]:
        """Bytes of every gradient."""
        return [tensor.elements * self.recipe.gradient for tensor in self.model.tensors if tensor.trained]
