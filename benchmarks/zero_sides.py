"""Shared by the benchmarks of `zero`: ways to shard a training, ours and PyTorch's, of the models of `ddp_models.py`.

zero1, zero2, zero3   ShardedDataParallel with its optimizer
zero, defaults        ZeroRedundancyOptimizer and DistributedDataParallel, both as they are without any option
zero, tuned           the same with gradient_as_bucket_view, parameters_as_bucket_view, a fused optimizer and DDP's
                      broadcast of buffers off (ours sends none)
fsdp2                 fully_shard of every unit and of the whole, with a fused optimizer
alone                 no wrapper, and a fused optimizer of all: what nobody shares costs
ddp                   DistributedDataParallel(gradient_as_bucket_view=True), no broadcast of buffers, a fused optimizer

A unit is a block of GPT, or a convolution of VGG with its norm; what is left belongs to the root.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from ddp_models import WRAPPERS, loss_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

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
    """A model that trains in one way, with its optimizer and the batches that it goes through."""

    def __init__(self, module: nn.Module, batches: Batches, optimizer: str = "adamw") -> None:
        self.module = module
        self.batches = batches
        self.kind, self.options = OPTIMIZERS[optimizer]
        self.model, self.optimizer = self.wrap()

    def wrap(self) -> tuple[nn.Module, Any]:
        """Return the wrapped module and its optimizer."""
        model = WRAPPERS["torch"](self.module)
        return model, self.kind(model.parameters(), fused=True, **self.options)

    def step(self) -> None:
        """Train on one batch."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def loss(self) -> Tensor:
        """Forward the next batch."""
        return loss_of(self.model, *next(self.batches))

    def rest(self) -> None:
        """Wait for what a step leaves under way."""

    def weights(self) -> Tensor:
        """Return all parameters, end to end: a collective, as the next one."""
        return _flat(parameter.detach() for parameter in self.module.parameters())

    def gradients(self) -> Tensor:
        """Return the mean gradients of the last step, end to end."""
        return _flat(each.grad for each in self.module.parameters() if each.grad is not None)


class Alone(Loop):
    """Every rank by itself."""

    def wrap(self) -> tuple[nn.Module, Any]:
        """Wrap nothing."""
        return self.module, self.kind(self.module.parameters(), fused=True, **self.options)


class ZeroDefaults(Loop):
    """What a tutorial shows."""

    def wrap(self) -> tuple[nn.Module, Any]:
        """Wrap with no option."""
        model = DistributedDataParallel(self.module)
        return model, zero_redundancy(model, self.kind, **self.options)


class ZeroTuned(Loop):
    """What PyTorch can do."""

    def wrap(self) -> tuple[nn.Module, Any]:
        """Wrap with the options that cost nothing."""
        model = WRAPPERS["torch"](self.module)
        options = {"parameters_as_bucket_view": True, "fused": True, **self.options}
        return model, zero_redundancy(model, self.kind, **options)


class Fsdp2(Loop):
    """PyTorch's sharding of parameters."""

    def wrap(self) -> tuple[nn.Module, Any]:
        """Shard every unit, then the rest."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard  # 2 s

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in units_of(self.module):
            fully_shard(list(unit), mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        fast = {"foreach": True} if self.kind is torch.optim.SGD else {"fused": True}  # DTensor has no fused SGD
        return self.module, self.kind(self.module.parameters(), **fast, **self.options)

    def weights(self) -> Tensor:
        """Gather all parameters."""
        return _flat(_whole(parameter.detach()) for parameter in self.module.parameters())

    def gradients(self) -> Tensor:
        """Gather all gradients."""
        return _flat(_whole(each.grad) for each in self.module.parameters() if each.grad is not None)


class Sharded(Loop):
    """Ours; `settings` are of the wrapper."""

    def __init__(self, module: nn.Module, batches: Batches, optimizer: str, stage: int, **settings: Any) -> None:
        self.stage = stage
        self.settings = {"stage": stage, "units": units_of(module), **settings}
        super().__init__(module, batches, optimizer)

    def wrap(self) -> tuple[nn.Module, Any]:
        """Wrap in this stage."""
        from muster.zero import ShardedDataParallel

        model = ShardedDataParallel(self.module, **self.settings)
        return model, model.optimizer(self.kind, fused=True, **self.options)

    def rest(self) -> None:
        """Wait for the parameters that are on their way."""
        self.model.synchronize()

    def weights(self) -> Tensor:
        """Gather all parameters."""
        with self.model.gather_full():
            return super().weights()

    def gradients(self) -> Tensor:
        """Gather all gradients."""
        found = self.model.full_gradients()
        return _flat(found[name] for name, _ in self.module.named_parameters())


THEIRS: dict[str, type[Loop]] = {
    "alone": Alone,
    "zero, defaults": ZeroDefaults,
    "zero, tuned": ZeroTuned,
    "fsdp2": Fsdp2,
    "ddp": Loop,
}


def loop_of(side: str, module: nn.Module, batches: Batches, optimizer: str = "adamw", **settings: Any) -> Loop:
    """Build a side; `settings` are of our wrapper."""
    if side in STAGES:
        return Sharded(module, batches, optimizer, STAGES[side], **settings)
    return THEIRS[side](module, batches, optimizer)


def zero_redundancy(model: nn.Module, kind: type[torch.optim.Optimizer], **options: Any) -> Any:
    """Build PyTorch's sharded optimizer; its module is slow to import, and warns of what it uses itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), kind, **options)


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor()
    return whole


def _flat(tensors: "Iterator[Tensor] | Sequence[Tensor]") -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
