"""Data parallel parameter by parameter, once the backward is over, when the wrapper is asked to: two ways to a mean.

    AllReduce       2 (W - 1) / W of the gradient's bytes over each link of a ring, whatever W is; no rank is special
    GatherScatter   rank 0   g0 <─┬── g1, g2, g3      gather: (W - 1) x gradient bytes into one link
                             mean ─┴─> mean x 3       scatter: the same bytes out of it

The order of an all-reduce's sum belongs to the backend, so with three ranks or more the last bits may differ from one
process. With `exact` every rank sums its part of the gradient in order and hands the sum on: the same bytes, and the
same bits on any number of ranks. The link of rank 0 is the bottleneck of `GatherScatter`; in return its sum has the
bits of one process that accumulates over the same shards, whether `exact` is asked for or not.
"""

from abc import abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.ddp.base import DataParallel
from muster.ddp.checks import require_used, used_by_any
from muster.ddp.collective_log import LOG
from muster.ddp.gradients import refuse_sparse
from muster.ddp.means import ordered_mean, sum_in_order
from muster.ddp.stats import Stats, Wait
from muster.ddp.timeouts import Entered, waiting_for


class AfterBackward(DataParallel):
    """Average parameter by parameter, all of the wait exposed; wrappers differ in how one gradient becomes its mean."""

    collectives_each = 1  # of a parameter
    operation = "all_reduce"

    def _prepare(self) -> None:
        self._shards: list[list[Tensor]] = []  # of virtual shards before this one; each one gradient a parameter
        self._earlier: set[str] = set()  # parameters that got a gradient in one of them
        self._synchronized = 0
        self._stats = Stats()
        self._watch: Wait | None = None
        self._judged = False

    def finish_gradient_synchronization(self) -> None:
        """Make every `.grad` the mean over all shards.

        A gradient that this rank has not counts as zeros; one that no rank has is refused the first time, or stays None
        with `find_unused_parameters`.

        Raises:
            RuntimeError: a parameter got no gradient on any rank, which the message names; or the last shard none.
        """
        if self._local or (self.ranks == 1 and not self._shards):
            return
        if self._shards:
            self._require_gradients()
        trainable = self.trainable()
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

    def stats(self) -> Stats:
        """Return what the last synchronization took: all of it is wait, for the backward was over."""
        waited = 0.0 if self._watch is None else self._watch.seconds
        return Stats(self._stats.collectives, self._stats.bytes, waited)

    @abstractmethod
    def _mean(self, gradients: list[Tensor]) -> Tensor:
        """Return the mean over ranks and shards of one parameter, from this rank's gradients, one a shard."""

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
        """Tell which parameters got a gradient on some rank; ask the others only when it matters."""
        if self._judged and not self.find_unused_parameters:
            return [True] * len(trainable)
        self._judged = True
        used = [parameter.grad is not None or name in self._earlier for name, parameter in trainable]
        if self.find_unused_parameters:
            return used_by_any(used, self.process_group, self.device)
        require_used([name for name, _ in trainable], used, self.process_group, self.device)
        return [True] * len(trainable)


class AllReduce(AfterBackward):
    """Average gradients with one all-reduce a parameter; with `exact` in shard order.

    Gradients of float16 are divided before they are summed, for the sum may not fit; all others after, which rounds
    once.
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
    """True where a mean is not of the type, or not laid out in memory, as its parameter is."""
    return mean.dtype != parameter.dtype or mean.stride() != parameter.stride()


def _gradient(name: str, parameter: nn.Parameter) -> Tensor:
    """Return a gradient as one block of memory, zeros if there is none; complex numbers as pairs of real ones.

    Raises:
        RuntimeError: it is sparse.
    """
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    refuse_sparse(name, gradient)
    gradient = gradient.contiguous()
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
