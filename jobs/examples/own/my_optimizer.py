"""An optimizer with sharded state: muster verify ../vgg11.yaml --with my_optimizer.py:ShardedOptimizer"""

from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer


class ShardedOptimizer(Optimizer):
    """Each rank updates its part of the parameters with an optimizer of any class, then broadcasts that part."""

    def __init__(self, params: Any, optimizer_cls: type[Optimizer], **options: Any) -> None:
        self.optimizer_cls, self.options = optimizer_cls, options
        self.inner: Optimizer | None = None
        self.owners: list[tuple[Any, int]] = []
        self.settings: list[tuple[dict[str, Any], dict[str, Any]]] = []  # own group, the inner optimizer's
        self.sizes = [0] * dist.get_world_size()
        super().__init__(params, options)  # calls add_param_group

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        mine = []
        for parameter in group["params"]:
            owner = self.sizes.index(min(self.sizes))
            self.sizes[owner] += parameter.numel()
            self.owners.append((parameter, owner))
            if owner == dist.get_rank():
                mine.append(parameter)
        if not mine:
            return
        part = {**group, "params": mine}
        if self.inner is None:
            self.inner = self.optimizer_cls([part], **self.options)
        else:
            self.inner.add_param_group(part)
        self.settings.append((group, self.inner.param_groups[-1]))

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group, inner in self.settings:  # a schedule changes this optimizer's groups
            inner.update({key: value for key, value in group.items() if key != "params"})
        if self.inner is not None:
            self.inner.step()
        for parameter, owner in self.owners:
            dist.broadcast(parameter.detach(), src=owner)
        return loss
