"""Base class of wrappers with a reducer, which synchronizes gradients during the backward, in buckets or shards."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from muster.ddp.base import DataParallel
from muster.ddp.reducer import Reducer
from muster.ddp.stats import Stats


class Reduced(DataParallel):
    """A wrapper that averages gradients with a reducer; `_reducer` is None if there is nothing to synchronize."""

    _reducer: Reducer[Any] | None = None

    def _set_local(self, local: bool) -> None:
        super()._set_local(local)
        if self._reducer is not None:
            self._reducer.local = local

    def finish_gradient_synchronization(self) -> None:
        """Finish the synchronization. With hooks, the backward has already finished it, unless it reached no parameter.

        Raises:
            RuntimeError: If a parameter got no gradient on any rank; the message names it.
        """
        if self._reducer is not None:
            if self._reducer.has_shards and not self._local:
                self._require_gradients()
            self._reducer.finish(asked=True)

    def gradients_are_ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Mark these parameters as ready. A bucket is launched when all its parameters are ready and all earlier
        buckets are launched.

        Raises:
            RuntimeError: If a parameter was already reported as ready in this synchronization.
        """
        if self._reducer is not None:
            self._reducer.complete(parameters)

    def launch_last(self, parameters: Iterable[nn.Parameter]) -> None:
        """Launch the buckets of these parameters last from now on. All ranks must pass the same parameters.

        Use this for gradients that become ready late, because a bucket delays all buckets launched after it.
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
