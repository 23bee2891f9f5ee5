"""Average gradients as they become ready: countdowns, launches in a fixed order, and one wait at the end.

    backward      h g | f e d | c b a |                    a hook on every parameter counts its bucket down
    launched         [h g]   [f e d]  [c b a]              in the planned order, whatever is ready first, so that the
    on the wire      =====   ========  ======|             collectives of all ranks match
    the end                            wait ^              in a callback of autograd, so that users need not call it

Li et al. 2020 (PyTorch Distributed) describe the countdown, and the reason for a fixed order.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Generic

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from muster.ddp.checks import require_used, used_by_any, warn_of_skipped
from muster.ddp.gradients import Bucket, Named, Slot
from muster.ddp.means import AnyBucket, Mean, Wait
from muster.ddp.stats import Stats
from muster.ddp.stats import Wait as Watch
from muster.ddp.timeouts import Entered, waiting_for


class Reducer(Generic[AnyBucket]):
    """A manager of one rank's gradient buckets. It launches buckets as they become complete, and waits for them.

    `buckets` are in the order of launches. `named` lists the trainable parameters with their names for messages.
    Without `hooks`, the backward does not report gradients, and `finish` sends all of them.
    """

    def __init__(
        self,
        named: Named,
        buckets: Sequence[AnyBucket],
        mean: Mean[AnyBucket],
        *,
        find_unused: bool = False,
        hooks: bool = True,
    ) -> None:
        self._names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.buckets = list(buckets)
        self.mean = mean
        self.find_unused = find_unused
        self.local = False  # True: gradients only accumulate
        self._sent = Stats()
        self.unused: frozenset[str] = frozenset()  # parameters that no rank has used, if `find_unused`
        self._scale = None if mean.scale == 1.0 else torch.tensor(mean.scale, dtype=torch.float64)
        self._hooked = hooks
        self._owed = False  # True: a synchronization is due, because a forward or a gradient came after the last one
        self._running = False  # True: from the first gradient of a synchronization to its end
        self._asked = False  # True: autograd will call back at the end of the backward
        self._waits: list[Wait] = []  # one wait per launched bucket
        self._without: list[str] = []  # parameters without a gradient in released buckets
        self._released: list[Bucket] = []
        self._synchronized = 0
        self._has_warned = False  # True: `_judge` has warned of a skipped parameter
        self._watch: Watch | None = None
        me = weakref.ref(self)  # after the wrapper is deleted, the hooks do nothing
        slots = [slot for bucket in self.buckets for slot in bucket.slots]
        self._slots = {id(slot.parameter): slot for slot in slots}
        self._handles = [
            slot.parameter.register_post_accumulate_grad_hook(partial(_ready, me, slot))  # type: ignore[no-untyped-call]
            for slot in (slots if hooks else ())
        ]
        weakref.finalize(self, _remove, self._handles, self.buckets).atexit = False

    def remove(self) -> None:
        """Remove the hooks from the parameters, and clear the buckets."""
        _remove(self._handles, self.buckets)

    def forward_begins(self) -> None:
        """Record that a forward begins. If the last backward raised an error, clean up first."""
        if self._running:
            self._give_up()
        self._owed = self._owed or not self.local

    def close_shard(self) -> None:
        """Set the current gradients aside as one virtual shard."""
        for bucket in self.buckets:
            bucket.close_shard()

    @property
    def has_shards(self) -> bool:
        """True if gradients of virtual shards are set aside."""
        return any(bucket.closed for bucket in self.buckets)

    def forget_shards(self) -> None:
        """Drop the virtual shards. If the last backward raised an error, clean up first."""
        if self._running:
            self._give_up()
        for bucket in self.buckets:
            bucket.reset()

    def finish(self, *, asked: bool = False) -> None:
        """Launch the remaining buckets, and wait for all buckets.

        `asked` is True if the user called this instead of autograd. Then do nothing if no synchronization is due.
        Without hooks, a synchronization is always due.

        Raises:
            RuntimeError: If a parameter has no gradient on any rank, or a collective failed.
        """
        if asked and (self.local or not (self._owed or self._running or not self._hooked)):
            return
        self._running, self._owed = False, False
        without = self._without
        for bucket in self.buckets:
            if bucket not in self._released:
                without += bucket.fill_missing(self._scale)
        for bucket in self.buckets[len(self._waits) :]:
            self._launch(bucket)
        watch = Watch(self.parameters[0].device)
        for bucket, wait in zip(self.buckets, self._waits, strict=True):
            self._wait(bucket, wait)
        watch.stop()
        self._watch = watch
        if self.mean.ranks > 1:
            self._sent = Stats(len(self._waits), sum(bucket.message_bytes for bucket in self.buckets))
        self._reset()
        self._synchronized += 1
        self._judge(without)

    def reorder(self, key: Callable[[AnyBucket], int]) -> None:
        """Launch buckets in another order from now on. The order must be the same on all ranks."""
        if not self._running:
            self.buckets.sort(key=key)
            for number, bucket in enumerate(self.buckets):
                bucket.number = number

    def release(self, buckets: Sequence[AnyBucket], *, are_over: bool = True) -> bool:
        """Allow `held` buckets to be launched once they are complete. Return False if the caller must retry.

        `are_over` is True if the backward of these parameters should be over, so that missing gradients can be filled
        in. If the running backward will still compute a missing gradient, the caller must retry.
        """
        if self.local or not self._running:
            return self.local
        for bucket in buckets:
            if are_over and bucket.waiting:
                if any(_will_come(slot) for slot in bucket.slots if not (slot.ready or slot.none)):
                    return False
                self._fill_missing(bucket)
                bucket.waiting = 0
            bucket.held = False
        self._launch_due()
        return True

    def measured(self) -> Stats:
        """Return statistics of the last synchronization. On CUDA, the host waits until it has ended."""
        waited = 0.0 if self._watch is None else self._watch.seconds
        return Stats(self._sent.collectives, self._sent.bytes, waited)

    def ready(self, slot: Slot) -> None:
        """Record that autograd has computed a parameter's gradient.

        Launch the buckets that are complete and next in order.
        """
        if slot.ready or slot.none:
            raise RuntimeError(
                f"{slot.name}: got a second gradient in one synchronization; run every backward but the last in "
                "no_sync(), and call torch.utils.checkpoint with use_reentrant=False"
            )
        is_none = slot.parameter.grad is None  # a custom autograd function returned None
        if self.local:
            if not is_none:
                slot.bucket.take(slot, None)
            self._owed = True
            return
        self._running = True
        if not self._asked:
            self._asked = True
            Variable._execution_engine.queue_callback(self._backward_is_over)
        self._count(slot, is_none=is_none)

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record gradients whose completion is reported by a caller instead of a hook. `finish` ends the
        synchronization.

        Raises:
            RuntimeError: If a gradient was already reported in this synchronization.
        """
        for parameter in parameters:
            if (slot := self._slots.get(id(parameter))) is None or parameter.grad is None:
                continue  # the parameter is frozen, or unused, which `finish` checks
            if slot.ready:
                raise RuntimeError(f"{slot.name}: its gradient was already reported as ready in this synchronization")
            self._running = True
            self._count(slot)

    def _count(self, slot: Slot, *, is_none: bool = False) -> None:
        bucket = slot.bucket
        slot.ready, slot.none = not is_none, is_none
        if not (is_none or bucket.wants_batches):
            bucket.take(slot, self._scale)
        bucket.waiting -= 1
        if not bucket.waiting:
            if any(each.none for each in bucket.slots):
                self._fill_missing(bucket)
            self._launch_due()

    def _fill_missing(self, bucket: Bucket) -> None:
        """Fill in the missing gradients of a bucket before the backward is over."""
        self._without += bucket.fill_missing(self._scale)
        self._released.append(bucket)

    def _launch_due(self) -> None:
        """Launch complete buckets, up to the first incomplete one."""
        for bucket in self.buckets[len(self._waits) :]:
            if bucket.waiting or bucket.held:
                return
            self._launch(bucket)

    def _backward_is_over(self) -> None:
        """Finish, unless this was a nested backward (reentrant checkpointing) and gradients are still missing."""
        self._asked = False
        nested = torch._C._current_autograd_node() is not None
        if not (nested and any(bucket.waiting for bucket in self.buckets)):
            self.finish()

    def _launch(self, bucket: AnyBucket) -> None:
        if self.mean.at_most is not None and (oldest := len(self._waits) - self.mean.at_most) >= 0:
            self._wait(self.buckets[oldest], self._waits[oldest])
        if bucket.wants_batches:
            bucket.take_all(self._scale)
        self._waits.append(self.mean.start(bucket))

    def _wait(self, bucket: Bucket, wait: Wait) -> None:
        with waiting_for(partial(self._entered, bucket), self.mean.group):
            wait()

    def _entered(self, bucket: Bucket) -> Entered:
        """Describe the bucket whose wait has failed."""
        first, last = bucket.slots[0], bucket.slots[-1]
        count = len(self.buckets)
        return Entered(
            self._synchronized + 1, bucket.number, count, len(self._waits), first.name, last.name, bucket.message_bytes
        )

    def _give_up(self) -> None:
        """Wait for the buckets that a failed backward has launched, because other ranks may also have launched them."""
        self.mean.wanted = False
        try:
            for bucket, wait in zip(self.buckets, self._waits, strict=False):
                self._wait(bucket, wait)
        finally:
            self.mean.wanted = True
            self._reset()

    def _reset(self) -> None:
        self._running, self._asked, self._waits = False, False, []
        self._without, self._released = [], []
        for bucket in self.buckets:
            bucket.reset()

    def _judge(self, without: Sequence[str]) -> None:
        """At the first synchronization, refuse parameters that no rank used. Later, warn once of such parameters.

        With `find_unused`, clear the `.grad` of such parameters at every synchronization instead.
        """
        if not self.find_unused and self._synchronized > 1:
            if without and not self._has_warned:
                means = [
                    (slot.name, slot.bucket.mean_of(slot)) for slot in self._slots.values() if slot.name in without
                ]
                self._has_warned = warn_of_skipped([(name, mean) for name, mean in means if mean is not None])
            return
        names = self._names
        used = [name not in without for name in names]
        device = self.parameters[0].device
        if not self.find_unused:
            require_used(names, used, self.mean.group, device)
            return
        by_any = used_by_any(used, self.mean.group, device)
        self.unused = frozenset(name for name, is_used in zip(names, by_any, strict=True) if not is_used)
        for name, parameter in zip(names, self.parameters, strict=True):
            if name in self.unused:
                parameter.grad = None


def _remove(handles: Sequence[RemovableHandle], buckets: Sequence[Bucket]) -> None:
    """Break the reference cycles of hooks, slots and buckets, so that memory is freed without the garbage collector."""
    for handle in handles:
        handle.remove()
    for bucket in buckets:
        bucket.slots.clear()


def _will_come(slot: Slot) -> bool:
    """Return whether the running backward will still compute this gradient."""
    node = torch.autograd.graph.get_gradient_edge(slot.parameter).node
    return torch._C._will_engine_execute_node(node)


def _ready(reducer: "weakref.ref[Reducer[AnyBucket]]", slot: Slot, parameter: Tensor) -> None:
    """Report a parameter's gradient to the reducer, unless the reducer was deleted. Every parameter has this hook."""
    if (alive := reducer()) is not None:
        alive.ready(slot)
