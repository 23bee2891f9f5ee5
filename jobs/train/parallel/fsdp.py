"""A copy of the model inside PyTorch's fully_shard (FSDP2): mode fsdp, for comparison with zero3.

Parameters become DTensors; every rank has some of their rows. As in PyTorch's documentation, fully_shard is called for
each unit from the inside out, then for the whole model. An ordinary optimizer updates a rank's rows, because fused SGD
does not support DTensors.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from muster.ddp.base import broadcast
from muster.ddp.checks import some_of
from muster.ddp.collective_log import LOG
from muster.ddp.primitives import all_gather, reduce_scatter
from muster.jobs.basics.errors import RefusedError
from muster.jobs.train.models.units import Unit, of_one_dtype, repeated, units_of
from muster.jobs.train.numerics import Numerics
from muster.jobs.train.numerics.optim import gradient_of, gradients_of
from muster.jobs.train.parallel.forms import Forms
from muster.jobs.train.parallel.replica import Replica
from muster.jobs.train.profiling.clock import StepMarks
from muster.jobs.world.world import World
from muster.zero.flat import ParameterRange

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


class FsdpReplica(Replica):
    """A copy whose parameters, gradients and optimizer state PyTorch shards by rows."""

    is_sharded = True
    not_timed = "fully_shard launches its collectives on streams of its own"

    def __init__(
        self, module: nn.Module, forms: Forms, world: World, clock: StepMarks, settings: "TrainSettings"
    ) -> None:
        super().__init__(module, world, clock)
        assert world.group is not None
        self.forms = forms
        self.adds_whole = settings.accumulate == "local"
        self.always_asks = settings.find_unused_parameters
        require_rows(module)
        reshard_after_forward = settings.reshard_after_forward
        broadcast([*module.parameters(), *module.buffers()], world.group)
        mesh = DeviceMesh.from_group(world.group, world.device.type)
        for each in module.modules():
            if isinstance(each, nn.RNNBase):  # on GPUs, it would copy the weights, and later gathers miss the copies
                each.flatten_parameters = _nothing  # type: ignore[method-assign]
        for unit in apart(module, units_of(module, settings.model)):
            for part in of_one_dtype(unit):
                fully_shard(list(part), mesh=mesh, reshard_after_forward=reshard_after_forward)
        # By default the root's parameters stay whole after its forward, because the backward begins with them.
        root = fully_shard(module, mesh=mesh, reshard_after_forward=None if reshard_after_forward else False)
        assert isinstance(root, FSDPModule)
        self.root = root
        self.leaves = leaves_of(module)
        self.used: set[str] | None = set()
        self.rows = {name: nn.Parameter(local(each), each.requires_grad) for name, each in module.named_parameters()}
        if world.device.type == "cpu":  # on CPUs, fully_shard waits for each collective immediately
            self.not_timed = ""
            for each in module.modules():
                if isinstance(each, FSDPModule):
                    each.set_custom_all_gather(cast(Any, Marked(all_gather, clock)))
                    each.set_custom_reduce_scatter(cast(Any, Marked(reduce_scatter, clock)))

    @contextmanager
    def _adding_whole(self) -> Iterator[None]:
        self.root.set_requires_gradient_sync(False)
        yield
        self.root.set_requires_gradient_sync(True)

    def accumulating(self) -> AbstractContextManager[Any]:
        """Return the context for all micro-batches but the last; `accumulate: local` keeps gradients unsharded."""
        return self._adding_whole() if self.adds_whole else super().accumulating()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of a micro-batch; `last` marks the rank's last micro-batch of the step.

        On CUDA, this class's hook marks the end of the backward. It runs before fully_shard's own callback, which waits
        for the last collectives.
        """
        self._require_same_used(loss, reduces=last or not self.adds_whole)
        start = loss.clone()
        if self.world.device.type != "cpu":
            start.register_hook(self._mark_the_end)  # type: ignore[no-untyped-call]
        torch.autograd.backward(start)
        self.clock.lap("backward" if self.world.device.type == "cpu" else "communication")

    def _require_same_used(self, loss: Tensor, *, reduces: bool) -> None:
        """Check that all ranks use the same parameters, in every step or in the first: a collective.

        `fully_shard` reduces the gradients that a rank has, without looking at those of the others.

        Raises:
            RefusedError: on every rank, if they do not.
        """
        if self.used is None:
            return
        self.used |= {self.leaves[id(each)] for each in leaves_below(loss) if id(each) in self.leaves}
        if not reduces:
            return
        mine = torch.tensor([name in self.used for name in self.rows], dtype=torch.uint8, device=self.world.device)
        uses = torch.stack(self.world.gather(mine)).sum(0).tolist()
        self.used = set() if self.always_asks else None
        if some := [name for name, ranks in zip(self.rows, uses, strict=True) if 0 < ranks < self.world.size]:
            raise RefusedError(
                f"train.mode: fsdp cannot train a step in which only some ranks use {some_of(some)}; choose another "
                "mode, such as zero3 with train.find_unused_parameters: true"
            )

    def _mark_the_end(self, gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(lambda: self.clock.lap("backward"))

    def gradients(self) -> list[Tensor]:
        """Move this rank's rows of the mean gradients from the DTensors to `rows`, and return them."""
        for parameter, row in zip(self.module.parameters(), self.rows.values(), strict=True):
            row.grad = None if parameter.grad is None else local(parameter.grad)
            parameter.grad = None
        return gradients_of(self.rows.values())

    def build_optimizer(self, numerics: Numerics, settings: "TrainSettings") -> torch.optim.Optimizer:
        """Build the optimizer of this rank's rows."""
        return numerics.optimizer(self.rows.values(), settings.optimizer)

    def ranges(self, optimizer: torch.optim.Optimizer) -> Sequence[ParameterRange]:
        """List this rank's rows of the state."""
        own = [self._held(name, None, row) for name, row in self.rows.items()]
        own += [
            self._held(name, key, value)
            for name, row in self.rows.items()
            for key, value in sorted(optimizer.state.get(row, {}).items())
            if isinstance(value, Tensor)
        ]
        return [each for each in own if each.start < each.stop]

    def _held(self, name: str, key: str | None, value: Tensor) -> ParameterRange:
        if value.dim() == 0:  # a scalar, the same on every rank
            return ParameterRange(name, key, (), 0, 1, value, answers=self.world.rank == 0)
        shape = self.forms.pieces[name].shape
        each = -(-shape[0] // self.world.size)
        start, stop = (
            prod((min(rank * each, shape[0]), *shape[1:])) for rank in (self.world.rank, self.world.rank + 1)
        )
        return ParameterRange(name, key, shape, start, stop, value.detach().view(-1))

    def predict(self, inputs: Tensor) -> Tensor:
        """Run the model without gradients; parameters stay sharded."""
        outputs = super().predict(inputs)
        for each in self.module.modules():
            if isinstance(each, FSDPModule):
                each.reshard()  # after a forward some parameters stay gathered for a backward
        return outputs

    def full_gradients(self) -> dict[str, Tensor]:
        """Gather the gradients."""
        named = self.module.named_parameters()
        return {name: whole(each, gradient_of(self.rows[name])) for name, each in named if each.requires_grad}

    def full_parameters(self) -> dict[str, Tensor]:
        """Gather the parameters."""
        return {name: whole(each, self.rows[name].detach()) for name, each in self.module.named_parameters()}


def _nothing() -> None:
    pass


def apart(module: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """Replace each unit that shares a parameter with other parts of the module by its repeated children, as long as
    there are some: `fully_shard` cannot share a parameter between units, so it belongs to the root.
    """
    users: dict[nn.Parameter, set[int]] = {}  # for each parameter the numbers of the units that use it, -1 for the root

    def visit(part: nn.Module, number: int) -> None:
        number = numbers.get(part, number)
        for each in part.parameters(recurse=False):
            users.setdefault(each, set()).add(number)
        for child in part.children():
            visit(child, number)

    numbers = {part: number for number, unit in enumerate(units) for part in unit}
    visit(module, -1)
    shared = {number for each in users.values() if len(each) > 1 for number in each}
    if shared.isdisjoint(numbers.values()):
        return list(units)
    kept = [
        [unit] if number not in shared else [(child,) for part in unit for child in repeated(part)]
        for number, unit in enumerate(units)
    ]
    return apart(module, [unit for each in kept for unit in each])


class Marked:
    """A collective of fully_shard on CPUs, with time marks at its beginning and end."""

    def __init__(self, collective: Callable[..., Any], clock: StepMarks) -> None:
        self.collective = collective
        self.clock = clock

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for sending or receiving."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, **options: Any) -> Any:
        """Run the collective."""
        self.clock.wait(True)
        finished = LOG.open(self.collective.__name__, max(output_tensor.nbytes, input_tensor.nbytes))
        work = self.collective(output_tensor, input_tensor, group=group, **options)
        finished()
        self.clock.wait(False)
        return work


def require_rows(module: nn.Module) -> None:
    """Check that `fully_shard` can cut every parameter into rows.

    Raises:
        RefusedError: if a parameter has no dimension, or its memory is not row-major.
    """
    for name, each in module.named_parameters():
        if each.dim() == 0 or not each.is_contiguous():
            what = f"is not row-major (strides {each.stride()})" if each.dim() else "has no dimension"
            raise RefusedError(
                f"train.mode: fsdp cannot cut {name}, of shape {tuple(each.shape)}, into rows, because it {what}; "
                "choose another mode, such as zero3"
            )


def leaves_of(module: nn.Module) -> dict[int, str]:
    """Return the names of the whole parameters that the module computes with, by id: a collective."""
    found: dict[int, str] = {}
    for prefix, each in module.named_modules():
        if isinstance(each, FSDPModule):
            each.unshard()
            found |= {id(whole): name for name, whole in module.get_submodule(prefix).named_parameters(prefix)}
            each.reshard()
    return found


def leaves_below(loss: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of a loss's graph."""
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        left += [each for each, _ in node.next_functions]


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a DTensor, without a copy."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def whole(like: Tensor, rows: Tensor) -> Tensor:
    """Gather all rows of a tensor that is sharded like `like`: a collective."""
    assert isinstance(like, DTensor)
    shared = DTensor.from_local(rows, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
    return shared.full_tensor().clone()
