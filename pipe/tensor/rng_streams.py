"""Separate random number streams per rank, for dropout of activations that are split over the ranks.

The caller must seed all ranks of a region alike. If a layer's elements are split, the ranks' masks must differ. So one
number is drawn from the common stream. Together with the rank number, this number seeds a separate stream. After the
layer, the common stream continues where it was. So random numbers depend on the seed alone, and a repeated forward
draws the same numbers again.
"""

from functools import partial
from typing import Any, Final

import torch
from torch import nn

from muster.ddp.compiler import outside
from muster.pipe.tensor.region import Region

_GOLDEN: Final = 0x9E3779B97F4A7C15  # an odd number near 2^64 / golden ratio, which spreads the seeds of adjacent ranks
_WORD: Final = (1 << 63) - 1


class OwnStream:
    """Hooks of a module that give this rank its own random stream within its forward, in training."""

    def __init__(self, module: nn.Module, region: Region) -> None:
        self.region = region
        self.before: list[list[tuple[torch.Generator, torch.Tensor]]] = []
        module.register_forward_pre_hook(partial(outside, self.begin))
        module.register_forward_hook(partial(outside, self.end), always_call=True)

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Switch from the common stream to this rank's."""
        generators = [torch.default_generator]
        if args and isinstance(args[0], torch.Tensor) and args[0].is_cuda:
            generators.append(torch.cuda.default_generators[args[0].device.index])
        if not module.training:
            generators = []
        common = int(torch.randint(_WORD, (), dtype=torch.int64)) if generators else 0
        self.before.append([(each, each.get_state()) for each in generators])
        for each in generators:
            each.manual_seed((common + (self.region.rank + 1) * _GOLDEN) & _WORD)

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Switch back to the common stream."""
        for generator, state in self.before.pop():
            generator.set_state(state)
