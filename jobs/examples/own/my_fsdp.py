"""A module with sharded parameters: muster verify ../vgg11.yaml --with my_fsdp.py:MyFSDP"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Unit:
    """The parameters of one child of the module. A rank keeps a shard, and gathers the whole when the child runs."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.parameters())
        world_size, rank = dist.get_world_size(), dist.get_rank()
        size = sum(each.numel() for each in self.parameters)
        each_size = -(-size // world_size)  # rounded up: the flat tensor is padded
        self.flat = torch.zeros(
            each_size * world_size, dtype=self.parameters[0].dtype, device=self.parameters[0].device
        )
        begin = 0
        for parameter in self.parameters:
            view = self.flat[begin : begin + parameter.numel()].view_as(parameter)
            view.copy_(parameter.detach())
            parameter.data = view
            begin += parameter.numel()
            parameter.register_post_accumulate_grad_hook(self.ready)
        self.nbytes = self.flat.untyped_storage().nbytes()
        self.shard = nn.Parameter(self.flat.view(world_size, -1)[rank].clone())
        self.missing = len(self.parameters)
        self.free()
        module.register_forward_pre_hook(self.gather)
        module.register_forward_hook(self.after)

    def gather(self, *_: Any) -> None:
        self.flat.untyped_storage().resize_(self.nbytes)
        dist.all_gather(list(self.flat.chunk(dist.get_world_size())), self.shard.detach())

    def free(self, *_: Any) -> None:
        self.flat.untyped_storage().resize_(0)

    def after(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.free()
        if output.requires_grad:
            output.register_hook(self.gather)  # the backward begins with the gradient of the output

    def ready(self, _: Tensor) -> None:
        """Reduce and scatter the gradients once the last one of the unit is complete."""
        self.missing -= 1
        if self.missing:
            return
        self.missing = len(self.parameters)
        gradients = torch.zeros_like(self.flat)
        torch.cat([each.grad.flatten() for each in self.parameters], out=gradients[: self.numel()])
        mine = torch.empty_like(self.shard)
        dist.reduce_scatter(mine, list(gradients.chunk(dist.get_world_size())))
        mine /= dist.get_world_size()
        self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine
        for parameter in self.parameters:
            parameter.grad = None
        self.free()

    def numel(self) -> int:
        return sum(each.numel() for each in self.parameters)


class MyFSDP(nn.Module):
    """Shard parameters, gradients and optimizer state over all ranks, child by child."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        named, once = list(module.named_parameters(remove_duplicate=False)), list(module.parameters())
        if len(named) > len(once):
            raise ValueError("a parameter is shared by two layers: it would have two shards")
        self.units = [Unit(each) for each in module.children() if any(True for _ in each.parameters())]

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield this rank's shards, for an optimizer."""
        return iter([unit.shard for unit in self.units])

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return all parameters by the names of the module; every rank must call this."""
        for unit in self.units:
            unit.gather()
        found = {name: each.detach().clone() for name, each in self.module.named_parameters()}
        for unit in self.units:
            unit.free()
        return found
