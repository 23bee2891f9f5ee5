"""Data parallelism with buckets: three wrappers that differ in the size of their buckets and in the time at which they
send them.

    FlatAllReduce    backward ........................ | one all-reduce of everything |
    OverlappedDDP    backward .....|.|...|..|.|....|.|   one per parameter, as it becomes ready
    BucketedDDP      backward ......|======|.....|======|   one per bucket, as its last gradient becomes ready

Every collective adds latency, so a few large buckets cost less. But a large bucket is complete late, and its collective
then delays the step. Buckets of about 25 MB are a compromise. The first one is small, to start communication early.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from muster.ddp.buckets import require_size
from muster.ddp.gradients import FlatGradients, LooseGradients, deal, travels_alone
from muster.ddp.means import NcclMean, mean_for
from muster.ddp.reduced import Reduced
from muster.ddp.reducer import Reducer


class _Buckets(Reduced):
    """Average gradients bucket by bucket."""

    hooks = True  # False: nothing is sent before the end of the backward
    bucket_size_mb: float | None = None  # maximum size of a bucket; None: one bucket per dtype

    def _prepare(self) -> None:
        self._reducer = self._build()

    def _settings(self) -> dict[str, object]:
        return {**super()._settings(), "bucket_size_mb": self.bucket_size_mb}

    @property
    def buckets(self) -> list[tuple[str, ...]]:
        """The names of the parameters of each bucket, in the order of launches."""
        buckets = [] if self._reducer is None else self._reducer.buckets
        return [tuple(slot.name for slot in bucket.slots) for bucket in buckets]

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the module. If gradients are enabled, the next backward will synchronize them."""
        if torch.is_grad_enabled():
            self._detect_changes()
            if self._reducer is not None:
                self._reducer.forward_begins()
            self._share_buffers()
        return self.module(*inputs, **keywords)

    def _build(self) -> Reducer[Any] | None:
        trainable = self.trainable()
        if not trainable or (self.ranks == 1 and not self.exact):
            return None  # with a single rank, its gradients are already the mean
        message = self.communication_dtype
        flat = not self.hooks or message is not None
        mean = mean_for(self.process_group, self.device, exact=self.exact, flat=flat)
        parts = deal(trainable, self.bucket_size_mb)
        asked, hooks = self.find_unused_parameters, self.hooks
        if isinstance(mean, NcclMean):
            loose = [LooseGradients(number, part) for number, part in enumerate(parts)]
            return Reducer(trainable, loose, mean, find_unused=asked, hooks=hooks)
        buckets = [
            FlatGradients(number, part, message, alone=travels_alone([each for _, each in part]))
            for number, part in enumerate(parts)
        ]
        return Reducer(trainable, buckets, mean, find_unused=asked, hooks=hooks)

    def _apply(self, *args: Any, **keywords: Any) -> Any:
        """Move or convert the module as `to` does, and rebuild the buckets."""
        moved = super()._apply(*args, **keywords)  # type: ignore[no-untyped-call]
        self._rebuild()
        return moved

    def _changed(self) -> None:
        self._rebuild()

    def _rebuild(self) -> None:
        if self._reducer is not None:
            self._reducer.remove()
        self._reducer = self._build()
        self._set_local(self._local)


class FlatAllReduce(_Buckets):
    """Average all gradients of one dtype with one all-reduce, after the backward."""

    hooks = False


class OverlappedDDP(_Buckets):
    """Average each parameter's gradient separately, as soon as it is ready, during the backward."""

    bucket_size_mb = 0.0


class BucketedDDP(_Buckets):
    """Average gradients during the backward, in buckets of at most `bucket_size_mb` MB of 2^20 bytes.

    If `bucket_size_mb` is None, there is one bucket per dtype.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        bucket_size_mb: float | None = 25.0,
        exact: bool = False,
        find_unused_parameters: bool = False,
        communication_dtype: torch.dtype | None = None,
        broadcast_buffers: bool = False,
    ) -> None:
        require_size(bucket_size_mb)
        self.bucket_size_mb = bucket_size_mb
        super().__init__(
            module,
            process_group,
            exact=exact,
            find_unused_parameters=find_unused_parameters,
            communication_dtype=communication_dtype,
            broadcast_buffers=broadcast_buffers,
        )
