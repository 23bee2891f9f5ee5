"""Master weights: the optimizer updates float32 copies of 16-bit parameters, and rounds them into the parameters.

    gradients, 16 bits ─► float32 ─► one fused step of the masters ─► parameters, 16 bits

An update is often smaller than the spacing of bfloat16 numbers and would be lost in the parameters; in the masters
updates accumulate. One call copies all parameters. Wider parameters are updated directly.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

MASTER: Final = "master"


class MasterWeights(torch.optim.Optimizer):
    """An optimizer of 16-bit parameters that wraps an optimizer of their masters.

    Its groups list the parameters. A parameter's state is the state of its master, and contains the master.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        own = [parameter for parameter in parameters if parameter.requires_grad]
        stepped = [nn.Parameter(each.detach().float()) if each.itemsize == 2 else each for each in own]
        self.inner = build(stepped)
        options = {key: value for key, value in self.inner.param_groups[0].items() if key != "params"}
        super().__init__([{"params": own}], options)
        pairs = [(low, master) for low, master in zip(own, stepped, strict=True) if low is not master]
        self.low = [low for low, _ in pairs]
        self.masters = [master for _, master in pairs]
        for parameter, each in zip(own, stepped, strict=True):
            state = self.inner.state[each]
            self.state[parameter] = state  # the same object, so both optimizers see all changes
            if parameter is not each:
                state[MASTER] = each.detach()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the masters with the parameters' gradients, and round them into the parameters."""
        assert closure is None
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: value for key, value in outer.items() if key != "params"})
        pairs = [(low, master) for low, master in zip(self.low, self.masters, strict=True) if low.grad is not None]
        gradients = [torch.empty_like(master) for _, master in pairs]
        if pairs:
            torch._foreach_copy_(gradients, [_gradient(low) for low, _ in pairs])
        for (_, master), gradient in zip(pairs, gradients, strict=True):
            master.grad = gradient
        self.inner.step()
        for _, master in pairs:
            master.grad = None
        if pairs:
            torch._foreach_copy_([low for low, _ in pairs], [master for _, master in pairs])


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
