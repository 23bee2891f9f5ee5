"""The load of a rank (model, element sizes, part of the batch), from which memory and times are predicted. Pure.

batch ─ shards (one per rank, or more for exact sums) ─ micro-batches of gradient accumulation ─ one forward
"""

from dataclasses import dataclass
from typing import Final, Literal

from muster.collectives_bench.cost.buckets import TORCH_BUCKET
from muster.jobs.models.anatomy import Anatomy

Accumulate = Literal["local", "sharded"]
COUNTER_BYTES: Final = 8  # bytes of each batch norm's batch counter
LEAST_STATISTICS: Final = 4  # bytes per element; batch norms stay in float32, whatever the dtype of the weights


@dataclass(frozen=True)
class Sizes:
    """Bytes per element of weights (and their gradients), optimizer states, master weights and activations."""

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
    """Bytes per parameter: value, gradient and optimizer states, which include the `master` copy."""

    parameter: int
    gradient: int
    optimizer: int
    master: int = 0

    @classmethod
    def of(cls, optimizer: str, *, momentum: bool, precision: str = "fp32") -> "Recipe":
        """Return the recipe of a job. AdamW has two states and momentum one; master weights count as states."""
        sizes = SIZES[precision]
        states = 2 if optimizer == "adamw" else int(momentum)
        return cls(sizes.weight, sizes.weight, states * sizes.state + sizes.master, sizes.master)


@dataclass(frozen=True)
class Split:
    """The division of ranks in several dimensions: the degrees, and the mode of the data-parallel ranks.

    `stages` lists the names of each stage's layers. If `stages` is empty, the model is cut into stages of nearly equal
    work.
    """

    data: int = 1
    pipe: int = 1
    tensor: int = 1
    zero: int = 0
    sync: str = "bucketed"
    stages: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class RankLoad:
    """A rank's load: the model, its part of the batch, and the settings that change memory or traffic."""

    model: Anatomy
    recipe: Recipe
    ranks: int
    batch: int  # number of samples in the global batch
    microbatches: int  # number of micro-batches in a pipeline
    itemsize: int  # bytes per element of activations
    backend: str = "gloo"
    bucket_bytes: int | None = TORCH_BUCKET  # bucket size in modes with buckets, except ddp; None: one bucket
    sent: int | None = None  # bytes per gradient element in messages of Muster's own wrappers; None: unchanged
    shards: int | None = None  # number of virtual ranks for exact sums; None: one per rank
    accumulation: int = 1  # number of micro-batches of a shard
    accumulate: Accumulate = "local"  # True: several backwards add up whole gradients; False: only shards
    reshard: bool = True  # True: sharded parameters are freed after the forward, and gathered again
    recompute: bool = False  # True: the backward repeats the forward of each block or pipeline stage
    sequence: bool = False  # True: between split layers, activations are split by tokens
    split: Split | None = None  # dimensions of pipelines and split layers; None: the mode uses all ranks

    @property
    def own_batch(self) -> int:
        """The largest number of samples of any data-parallel rank."""
        return -(-self.batch // self.ranks)

    @property
    def own_shards(self) -> int:
        """The number of shards that a data-parallel rank processes in sequence."""
        return 1 if self.shards is None else -(-self.shards // self.ranks)

    @property
    def adds_up(self) -> bool:
        """True if a rank runs several backwards in a step."""
        return self.own_shards * self.accumulation > 1

    def at_once(self, ranks: int) -> int:
        """Return the largest number of samples in one forward if `ranks` ranks share the batch."""
        shards = max(ranks, self.shards or 0)
        samples = -(-self.batch // shards)
        return -(-samples // self.accumulation)

    def sent_bytes(self, nbytes: int) -> int:
        """Return the bytes that Muster's own wrappers send for gradients of `nbytes` bytes."""
        return nbytes if self.sent is None else nbytes * self.sent // self.recipe.gradient

    @property
    def buffer_bytes(self) -> int:
        """The bytes of batch norm statistics and of the buffers of a user's model."""
        own = sum(part.buffer_bytes for part in self.model.parts)
        norms = sum(1 for part in self.model.parts if part.name.startswith("norm") and self.model.buffers)
        return self.model.buffers * max(LEAST_STATISTICS, self.recipe.parameter) + norms * COUNTER_BYTES + own

    @property
    def gradient_sizes(self) -> list[int]:
        """The bytes of each gradient."""
        return [tensor.elements * self.recipe.gradient for tensor in self.model.tensors if tensor.trained]
