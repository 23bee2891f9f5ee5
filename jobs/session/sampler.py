"""Divide a data set's samples among ranks, batch by batch. A resume on any number of ranks continues the same epoch.

    epoch 3, 10 samples, 2 ranks, batch of 2    [7 1 | 4 0]  [9 3 | 8 2]  [5 | 6]
    resumed on 3 ranks after the first step                  [9 3 | 8 2 | 5 6]

The order of the samples depends only on the seed and the epoch. The next batch depends only on the position: the number
of the epoch's samples that all ranks together have used. Batches that a loader has read ahead do not count.
"""

from collections.abc import Iterator, Mapping, Sized
from typing import Any

from muster.jobs.basics.errors import RefusedError


class Sampler:
    """This rank's batches of sample indices, for use as the `batch_sampler` of a `torch.utils.data.DataLoader`.

    Every batch is one step. An iteration yields the rest of an epoch; the next iteration begins the next epoch. Each
    sample occurs once in an epoch. If a resume leaves fewer samples than ranks, some ranks repeat a sample.
    """

    def __init__(
        self, samples: int, batch_size: int, *, rank: int, ranks: int, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        if batch_size < 1:
            raise RefusedError(f"run.sampler: batch_size must be at least 1, got {batch_size}")
        if samples < ranks or (drop_last and samples < batch_size * ranks):
            raise RefusedError(
                f"run.sampler: {samples} samples are too few for {ranks} ranks with a batch of {batch_size}; "
                "use fewer ranks or a smaller batch"
            )
        self.samples = samples
        self.batch_size = batch_size
        self.rank = rank
        self.ranks = ranks
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.position = 0  # number of the epoch's samples that all ranks together have used

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        full, rest = divmod(self.samples, self.batch_size * self.ranks)
        return full + (rest >= self.ranks and not self.drop_last)

    @property
    def is_done(self) -> bool:
        """True when every batch of the epoch has been used."""
        return self._next(self.position) is None

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the remaining batches of the epoch. If it is complete, begin the next epoch."""
        if self.is_done:
            self.set_epoch(self.epoch + 1)
        order, position = self._order(), self.position
        while (stop := self._next(position)) is not None:
            yield [order[index] for index in self._share(position, stop)]
            position = stop

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it has begun already."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def advance(self, steps: int = 1) -> None:
        """Count the batches of `steps` steps as used. The session calls this after every step."""
        for _ in range(steps):
            if self.is_done:
                self.set_epoch(self.epoch + 1)
            stop = self._next(self.position)
            assert stop is not None
            self.position = stop

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, which is the same on every rank."""
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed, "samples": self.samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position in the data, on any number of ranks.

        Raises:
            RefusedError: if the number of samples or the seed differs.
        """
        for name, now in (("samples", self.samples), ("seed", self.seed)):
            if state[name] != now:
                raise RefusedError(
                    f"sampler: the checkpoint was saved with {name} {state[name]}, but this program has {now}; "
                    "use the same data and seed, or begin a new run"
                )
        self.epoch, self.position = state["epoch"], state["position"]

    def _next(self, position: int) -> int | None:
        """Return the end of the global batch that begins at a position; None at the end of the epoch."""
        left, whole = self.samples - position, self.batch_size * self.ranks
        if left == 0 or (self.drop_last and left < whole):
            return None
        # If fewer samples than ranks would remain, this batch includes them.
        return self.samples if left < whole + (0 if self.drop_last else self.ranks) else position + whole

    def _share(self, start: int, stop: int) -> range:
        """Return this rank's part of the global batch from `start` to `stop`, as positions in the epoch's order."""
        size, larger = divmod(stop - start, self.ranks)
        if size == 0:
            place = start + self.rank % larger
            return range(place, place + 1)
        low = start + self.rank * size + min(self.rank, larger)
        return range(low, low + size + (self.rank < larger))

    def _order(self) -> Any:
        """Return the order of the epoch's samples: (samples,) indices."""
        if not self.shuffle:
            return range(self.samples)
        from muster.jobs.train.rng.keyed import permutation

        return permutation(self.seed, self.epoch, self.samples).tolist()


def samples_of(dataset: Sized | int) -> int:
    """Return the number of samples of a data set with a length, or the given number."""
    if isinstance(dataset, int):
        return dataset
    try:
        return len(dataset)
    except TypeError as error:
        raise RefusedError(
            f"run.sampler: {type(dataset).__name__} has no length, so its samples cannot be divided among ranks; "
            "pass a data set with __len__, or the number of samples"
        ) from error
