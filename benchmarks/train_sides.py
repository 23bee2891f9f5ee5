"""Ways to train the models of `ddp_models.py` on all ranks, ours and PyTorch's, each with a fused optimizer.

bucketed              BucketedDDP
ddp                   DistributedDataParallel(gradient_as_bucket_view=True), its broadcast of buffers off, as ours has
                      none
ddp, buffers          the same as torch has it by default: rank 0's buffers are broadcast in every forward
zero1, zero2, zero3   ShardedDataParallel with its optimizer
zero, defaults        ZeroRedundancyOptimizer and DistributedDataParallel, both as they are without any option
zero, tuned           ZeroRedundancyOptimizer(parameters_as_bucket_view=True) and `ddp`
fsdp2                 fully_shard of every unit and of the whole
alone                 no wrapper: what nobody shares costs

A unit is a block of GPT, or a convolution of VGG with its norm; what is left belongs to the root.
"""

import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from ddp_models import loss_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from muster.ddp import BucketedDDP
from muster.zero import ShardedDataParallel

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-4}),
    "sgd": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "plain sgd": (torch.optim.SGD, {"lr": 1e-3}),
}
Batches = Iterator[tuple[Tensor, Tensor]]


def units_of(module: nn.Module) -> list[tuple[nn.Module, ...]]:
    """List what is sharded together: blocks of a GPT; convolutions of a VGG, each with its norm."""
    named = dict(module.named_children())
    blocks = [(each,) for name, each in named.items() if name.startswith("block")]
    pairs = [(each, named[name.replace("conv", "norm")]) for name, each in named.items() if name.startswith("conv")]
    return [*blocks, *pairs]


class Loop:
    """A model that trains in one way, with its optimizer and its batches; `settings` are of our sharded wrapper."""

    def __init__(
        self, side: str, module: nn.Module, batches: Batches, optimizer: str = "adamw", **settings: Any
    ) -> None:
        self.side, self.module, self.batches = side, module, batches
        self.model, self.optimizer = wrapped(side, module, *OPTIMIZERS[optimizer], **settings)

    def step(self) -> None:
        """Train on one batch."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def block(self, steps: int) -> None:
        """Train on some batches, until nothing is under way any more."""
        for _ in range(steps):
            self.step()
        self.rest()

    def loss(self) -> Tensor:
        """Forward the next batch."""
        return loss_of(self.model, *next(self.batches))

    def rest(self) -> None:
        """Wait for the parameters that a step leaves on their way."""
        if self.side in STAGES:
            self.model.synchronize()

    def weights(self) -> Tensor:
        """Return all parameters, end to end: a collective, as the next one."""
        if self.side not in STAGES:
            return _flat(parameter.detach() for parameter in self.module.parameters())
        with self.model.gather_full():
            return _flat(parameter.detach() for parameter in self.module.parameters())

    def gradients(self) -> Tensor:
        """Return the mean gradients of the last step, end to end."""
        if self.side not in STAGES:
            return _flat(each.grad for each in self.module.parameters() if each.grad is not None)
        found = self.model.full_gradients()
        return _flat(found[name] for name, _ in self.module.named_parameters())


def wrapped(
    side: str, module: nn.Module, kind: type[torch.optim.Optimizer], options: dict[str, Any], **settings: Any
) -> tuple[Any, Any]:
    """Return the wrapped module and its optimizer."""
    if side in STAGES:
        model = ShardedDataParallel(module, stage=STAGES[side], units=units_of(module), **settings)  # type: ignore[arg-type]
        return model, model.optimizer(kind, fused=True, **options)
    if side == "fsdp2":
        # DTensor has no fused SGD.
        fast = {"foreach": True} if kind is torch.optim.SGD else {"fused": True}
        fully_sharded(module, units_of(module))
        return module, kind(module.parameters(), **fast, **options)
    if side == "zero, defaults":
        plain = DistributedDataParallel(module)
        return plain, zero_redundancy(plain, kind, **options)
    wrapper = {"bucketed": BucketedDDP, "alone": lambda module: module}.get(side)
    model = wrapper(module) if wrapper else torch_ddp(module, buffers=side == "ddp, buffers")
    if side == "zero, tuned":
        return model, zero_redundancy(model, kind, parameters_as_bucket_view=True, fused=True, **options)
    return model, kind(model.parameters(), fused=True, **options)


def torch_ddp(module: nn.Module, *, buffers: bool, **options: Any) -> nn.Module:
    """Wrap in PyTorch's DDP; its default sends batch norm's buffers in every forward, without it is faster."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters  # torch 2.13 renamed the switch
    switch = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    off = {} if buffers else {switch: False}
    return DistributedDataParallel(module, gradient_as_bucket_view=True, **off, **options)


def fully_sharded(module: nn.Module, units: Sequence[Sequence[nn.Module]], **options: Any) -> None:
    """Shard every unit, then the rest, in place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # 2 s

    mesh = init_device_mesh(next(module.parameters()).device.type, (dist.get_world_size(),))
    for unit in (*map(list, units), module):
        fully_shard(unit, mesh=mesh, **options)


def zero_redundancy(module: nn.Module, kind: type[torch.optim.Optimizer], **options: Any) -> Any:
    """Build PyTorch's sharded optimizer; its module is slow to import, and warns of what it uses itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(module.parameters(), kind, **options)


def apart(sides: "list[Tensor]", norm: float = float("inf")) -> float:
    """Return how far tensors are from the first of them, as a share of it."""
    first, *others = sides
    return max(((other - first).norm(norm) / first.norm(norm)).item() for other in others)


def _flat(tensors: "Iterable[Any]") -> Tensor:
    """Join tensors, or DTensors, which are gathered."""
    whole = (each.full_tensor() if hasattr(each, "full_tensor") else each for each in tensors)
    return torch.cat([each.flatten() for each in whole])
