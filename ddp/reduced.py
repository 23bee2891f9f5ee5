"""A wrapper whose gradients a reducer takes from the backward: what buckets and shards have in common."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from muster.ddp.base import DataParallel
from muster.ddp.reducer import Reducer
from muster.ddp.stats import Stats


class Reduced(DataParallel):
    """A wrapper with a reducer, or with none where there is nothing to synchronize."""

    _reducer: Reducer[Any] | None = None

    def _set_local(self, local: bool) -> None:
        super()._set_local(local)
        if self._reducer is not None:
            self._reducer.local = local

    def finish_gradient_synchronization(self) -> None:
        """Finish what the backward has not: with hooks only a backward that reached no parameter.

        Raises:
            RuntimeError: a parameter got no gradient on any rank; the message names it.
        """
        if self._reducer is not None:
            if self._reducer.has_shards and not self._local:
                self._require_gradients()
            self._reducer.finish(asked=True)

    def gradients_are_ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Count these down: a bucket whose last one is among them is launched, in its turn.

        Raises:
            RuntimeError: one was said to be ready before in this synchronization.
        """
        if self._reducer is not None:
            self._reducer.complete(parameters)

    def launch_last(self, parameters: Iterable[nn.Parameter]) -> None:
        """Launch the buckets of these after all others from now on; every rank names the same.

        What is ready late would keep back all that comes after it.
        """
        if self._reducer is not None:
            late = {id(each) for each in parameters}
            self._reducer.reorder(lambda bucket: any(id(slot.parameter) in late for slot in bucket.slots))

    def stats(self) -> Stats:
        return Stats() if self._reducer is None else self._reducer.measured()

    def _close_shard(self) -> None:
        if self._reducer is not None:
            self._reducer.close_shard()

    def forget_shards(self) -> None:
        if self._reducer is not None:
            self._reducer.forget_shards()
