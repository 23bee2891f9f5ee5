"""Values derived from the keys of a `train:` section: its mode, its split, its batches.

Two classes inherit these rules. `TrainSettings` (`jobs/spec/train.py`) validates the keys with pydantic. `PlainTrain`
(`jobs/spec/plain.py`) has the validated keys on a rank, whose Python needs only torch.
"""

from typing import TYPE_CHECKING

from muster.jobs.basics.words import counted
from muster.jobs.spec.expand import check_batch, check_pipeline, check_tensor, split_of, with_copies
from muster.jobs.spec.modes import MODES, PIPELINES, TENSOR, Parallel, Sync, Zero, mode_of

if TYPE_CHECKING:
    from muster.jobs.spec.train_fields import TrainFields  # the type of the keys that the rules read
else:
    TrainFields = object


class TrainRules(TrainFields):
    """Values derived from the keys of `train:`, some of them for a given world size."""

    @property
    def mode_name(self) -> str:
        """The mode. For a split given by `parallel:`, the mode whose rules apply to it (`mode_of`)."""
        if self.parallel is None:
            return self.mode
        given = self.parallel
        return mode_of(Parallel(tensor=given.tensor, sync=given.sync, zero=given.zero, schedule=given.schedule or ""))

    @property
    def makes(self) -> dict[str, str]:
        """The keys that name the user's own code, with their values."""
        keys = {
            "train.model.make": self.model.make,
            "train.model.plan": self.model.plan,
            "train.data.make": self.data.make,
            "train.loss": self.loss,
            "train.optimizer.make": self.optimizer.make,
        }
        return {key: text for key, text in keys.items() if text is not None}

    @property
    def is_pipeline(self) -> bool:
        """True if each rank has a slice of the layers."""
        return self.mode_name in PIPELINES

    @property
    def is_product(self) -> bool:
        """True if ranks are split in more than one way, such as data-parallel pipelines or stages with split layers."""
        several = self.parallel is not None and self.parallel.data > 1
        return several + self.is_pipeline + self.splits_layers > 1

    @property
    def splits_layers(self) -> bool:
        """True if each rank has a part of every layer."""
        return self.mode == TENSOR if self.parallel is None else self.parallel.tensor > 1

    @property
    def uses_compiler(self) -> bool:
        """Whether ranks import PyTorch's compiler: for `compile`, or because other parts of PyTorch import it.

        An example is the meta device, on which the operations of a user's layers are counted.
        """
        others = self.activation_checkpointing or self.mode_name in ("ddp", "fsdp")
        counts = self.is_pipeline and self.cut == "flops" and self.model.make is not None
        return self.compile or others or counts

    @property
    def sync(self) -> Sync:
        """The way in which data-parallel ranks average gradients."""
        return MODES[self.mode].expand(1).sync if self.parallel is None else self.parallel.sync

    @property
    def zero(self) -> Zero:
        """The ZeRO stage."""
        return MODES[self.mode].expand(1).zero if self.parallel is None else self.parallel.zero

    @property
    def same_norm(self) -> bool:
        """True if the gradient norm must have the same bits for every distribution of the gradients over ranks."""
        return self.exact or self.deterministic

    def virtual_world_size(self, world_size: int) -> int:
        """Return the number of shards of a global batch: `virtual_ranks` if exact (default 4), else one per rank.

        Ranks that together hold one copy of the model share one shard.
        """
        if self.is_pipeline or self.splits_layers:
            return 1 if self.parallel is None else self.parallel.data
        return (self.virtual_ranks or 4) if self.exact else world_size

    def split(self, world_size: int) -> Parallel:
        """Return the split that the mode or `parallel:` gives for a world size.

        Raises:
            RefusedError: if the split does not fit the world size.
        """
        return split_of(self, world_size)

    def accumulation(self, world_size: int) -> int:
        """Return the number of micro-batches of a shard."""
        return self.split(world_size).microbatches if self.is_pipeline else self.grad_accumulation

    def check(self, world_size: int) -> None:
        """Refuse settings that do not fit the world size.

        Raises:
            RefusedError: if the batch is too small, there are more stages than layers, layers cannot be split over this
                many ranks, or the number of virtual ranks is not a multiple of the number of ranks.
        """
        parallel = self.split(world_size)
        if parallel.tensor > 1:
            check_tensor(self, parallel)
        if parallel.schedule:
            check_pipeline(self, parallel)
            return
        check_batch(self, parallel, self.virtual_world_size(world_size))


def told_division(settings: TrainRules, before: int, now: int) -> str:
    """Describe how the division of every batch changes with the number of ranks; "" if it does not."""
    fitted = [(with_copies(settings, ranks), ranks) for ranks in (before, now)]
    parts = [(each.virtual_world_size(ranks), each.accumulation(ranks)) for each, ranks in fitted]
    changes = [
        f"{counted(has, name)} instead of {had}"
        for name, had, has in zip(("shard", "micro-batch"), *parts, strict=True)
        if had != has
    ]
    if not changes:
        return ""
    return (
        f"{counted(now, 'rank')} instead of {before}: batches are divided into {' and '.join(changes)}, which changes "
        "rounding and random numbers; exact: true keeps results equal"
    )
