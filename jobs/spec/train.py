"""`train:` of a job file: its keys, held against each other and against the number of ranks."""

from pydantic import model_validator
from typing_extensions import Self

from muster.jobs.spec.conflicts import conflict
from muster.jobs.spec.expand import check_batch, check_pipeline, check_tensor, split_of
from muster.jobs.spec.modes import Parallel
from muster.jobs.spec.train_fields import TrainFields


class TrainSettings(TrainFields):
    """`train:` - a model, its data, how the work is split, and for how long."""

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if why := conflict(self):
            raise ValueError(why)
        return self

    def split(self, world_size: int) -> Parallel:
        """Expand mode or `parallel:` for a world size.

        Raises:
            RefusedError: the split does not fit the world size.
        """
        return split_of(self, world_size)

    def is_tied_over_stages(self, world_size: int) -> bool:
        """True where a weight of the first stage of a pipeline is one of the last, too."""
        split = self.split(world_size)
        return bool(split.schedule) and split.pipe * split.chunks > 1 and self.model.ties_head

    def accumulation(self, world_size: int) -> int:
        """Return the micro-batches of a shard."""
        return self.split(world_size).microbatches if self.is_pipeline else self.grad_accumulation

    def check(self, world_size: int) -> None:
        """Refuse what only the world size shows.

        Raises:
            RefusedError: too small a batch, more stages than layers, layers that cannot be split over so many ranks,
                or virtual ranks that the ranks do not divide.
        """
        parallel = self.split(world_size)
        if parallel.tensor > 1:
            check_tensor(self, parallel)
        if parallel.schedule:
            check_pipeline(self, parallel)
            return
        check_batch(self, parallel)
