"""Data parallelism without overlap: average gradients after the backward, one parameter at a time.

    AllReduce       2 (W - 1) / W of the gradient's bytes over each link of a ring, for any W; all ranks are equal
    GatherScatter   rank 0   g0 <─┬── g1, g2, g3      gather: (W - 1) x gradient bytes into one link
                             mean ─┴─> mean x 3       scatter: the same bytes out of it

The backend chooses the order in which an all-reduce adds, so with three or more ranks the last bits may differ from
those of one process. With `exact`, every rank sums one part of the gradient in rank order and sends the sum to all
other ranks. With one shard per rank, this sends as many bytes as an all-reduce. In `GatherScatter`, the link of rank 0
is the bottleneck, but gradients are always added in the order of the ranks. Sums in rank order are bitwise identical to
those of one process that accumulates over the same shards.
"""

from abc import abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.ddp.base import DataParallel
from muster.ddp.checks import require_used, used_by_any, warn_of_skipped
from muster.ddp.collective_log import LOG
from muster.ddp.gradients import refuse_sparse
from muster.ddp.means import ordered_mean, sum_in_order
from muster.ddp.stats import Stats, Wait
from muster.ddp.timeouts import Entered, waiting_for


class AfterBackward(DataParallel):
    """Average the gradients of one parameter after another, without overlap.

    Subclasses define how one gradient is averaged.
    """

    collectives_each = 1  # per parameter
    operation = "all_reduce"

    def _prepare(self) -> None:
        self._shards: list[list[Tensor]] = []  # earlier virtual shards, each with one gradient per parameter
        self._earlier: set[str] = set()  # names of parameters with a gradient in an earlier shard
        self._synchronized = 0
        self._stats = Stats()
        self._watch: Wait | None = None
        self._judged = False
        self._has_warned = False

    def finish_gradient_synchronization(self) -> None:
        """Set every `.grad` to the mean over all shards.

        If a gradient is missing only on this rank, it counts as zeros. If a parameter has no gradient on any rank, the
        first synchronization raises an error; with `find_unused_parameters`, its `.grad` stays None instead.

        Raises:
            RuntimeError: If a parameter got no gradient on any rank (the message names it), or the last virtual shard
                has no gradient.
        """
        if self._local or (self.ranks == 1 and not self._shards):
            return
        if self._shards:
            self._require_gradients()
        trainable = self.trainable()
        was_judged = self._judged
        skipped = [pair for pair in trainable if pair[1].grad is None and pair[0] not in self._earlier]
        used = self._used(trainable)
        shards, self._shards, self._earlier = self._shards, [], set()
        watch, sent = Wait(self.device), 0
        for index, (name, parameter) in enumerate(trainable):
            if not used[index]:
                parameter.grad = None
                continue
            own = [*(shard[index] for shard in shards), _gradient(name, parameter)]
            if self.communication_dtype is not None and not parameter.is_complex():
                own = [gradient.to(self.communication_dtype) for gradient in own]
            own_bytes = sum(gradient.numel() * gradient.element_size() for gradient in own)
            entered = Entered(self._synchronized + 1, index, len(trainable), index + 1, name, name, own_bytes)
            with waiting_for(entered, self.process_group):
                finished = LOG.open(self.operation, own_bytes)
                mean = self._mean(own)
                finished()
            if parameter.is_complex():
                mean = torch.view_as_complex(mean)
            parameter.grad = torch.empty_like(parameter).copy_(mean) if _differ(mean, parameter) else mean
            sent += own_bytes
        watch.stop()
        self._synchronized += 1
        self._stats, self._watch = Stats(sum(used) * self.collectives_each, sent), watch
        if was_judged and not (self.find_unused_parameters or self._has_warned):
            self._has_warned = warn_of_skipped([(name, each.grad) for name, each in skipped if each.grad is not None])

    def stats(self) -> Stats:
        """Return statistics of the last synchronization. All of its time counts as waiting time."""
        waited = 0.0 if self._watch is None else self._watch.seconds
        return Stats(self._stats.collectives, self._stats.bytes, waited)

    @abstractmethod
    def _mean(self, gradients: list[Tensor]) -> Tensor:
        """Return the mean gradient of one parameter over ranks and shards, given this rank's gradient of each shard."""

    def _close_shard(self) -> None:
        self._shards.append([_gradient(name, parameter) for name, parameter in self.trainable()])
        for name, parameter in self.trainable():
            self._earlier |= set() if parameter.grad is None else {name}
            parameter.grad = None

    def forget_shards(self) -> None:
        self._shards, self._earlier = [], set()

    def _changed(self) -> None:
        self._judged = False

    def _used(self, trainable: list[tuple[str, nn.Parameter]]) -> list[bool]:
        """Return which parameters got a gradient on some rank.

        This communicates only at the first synchronization, or at every synchronization with `find_unused_parameters`.
        """
        if self._judged and not self.find_unused_parameters:
            return [True] * len(trainable)
        self._judged = True
        used = [parameter.grad is not None or name in self._earlier for name, parameter in trainable]
        if self.find_unused_parameters:
            return used_by_any(used, self.process_group, self.device)
        require_used([name for name, _ in trainable], used, self.process_group, self.device)
        return [True] * len(trainable)


class AllReduce(AfterBackward):
    """Average gradients with one all-reduce per parameter, or with `exact` by sums in shard order.

    float16 gradients are divided before the sum, because their sum could overflow. Other types are divided afterwards,
    which rounds only once.
    """

    def _mean(self, gradients: list[Tensor]) -> Tensor:
        if self.exact:
            mean = torch.empty_like(gradients[0])
            ordered_mean([gradient.view(-1) for gradient in gradients], mean.view(-1), self.process_group)
            return mean
        (gradient,) = gradients
        overflows = gradient.dtype == torch.float16
        if overflows:
            gradient = gradient / self.ranks
        dist.all_reduce(gradient, op=dist.ReduceOp.SUM, group=self.process_group)
        return gradient if overflows else gradient.div_(self.ranks)


class GatherScatter(AfterBackward):
    """Average gradients on rank 0, one parameter at a time."""

    collectives_each = 2
    operation = "gather and scatter"

    def _mean(self, gradients: list[Tensor]) -> Tensor:
        is_root = dist.get_rank(self.process_group) == 0
        mine = torch.stack(gradients)  # (shards, *parameter)
        gathered = [torch.empty_like(mine) for _ in range(self.ranks)] if is_root else None
        dist.gather(mine, gathered, group=self.process_group, group_dst=0)
        mean = torch.empty_like(gradients[0])
        copies = None
        if gathered is not None:
            shards = [shard for rank in gathered for shard in rank]
            copies = [sum_in_order(shards).div_(len(shards))] * self.ranks
        dist.scatter(mean, copies, group=self.process_group, group_src=0)
        return mean


def _differ(mean: Tensor, parameter: Tensor) -> bool:
    """Return whether a mean differs from its parameter in dtype or strides."""
    return mean.dtype != parameter.dtype or mean.stride() != parameter.stride()


def _gradient(name: str, parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient, made contiguous, or zeros if it has none. View complex numbers as pairs of reals.

    Raises:
        RuntimeError: If the gradient is sparse.
    """
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    refuse_sparse(name, gradient)
    gradient = gradient.contiguous()
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
