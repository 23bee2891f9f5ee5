"""Random numbers of a rank's own, for dropout of what the ranks have split; everywhere else they draw the same.

All ranks of a region come with the same state of the random generators, as whoever seeds them sees to. Where a layer's
elements are split, masks must differ: one number is drawn from the common state, and with it and the rank's number
another stream begins. When the layer has run, the common one goes on where it was. So draws are still a function of
the seed alone, and a forward that is run again draws again what it drew.
"""

from functools import partial
from typing import Any, Final

import torch
from torch import nn

from muster.pipe.tensor.region import Region, outside_graph

_GOLDEN: Final = 0x9E3779B97F4A7C15  # of Weyl's sequence: seeds of neighbouring ranks share no low bits
_WORD: Final = (1 << 63) - 1


class OwnDraws:
    """Hooks of a module: within its forward, in training, this rank draws numbers of its own."""

    def __init__(self, module: nn.Module, region: Region) -> None:
        self.region = region
        self.before: list[list[tuple[torch.Generator, torch.Tensor]]] = []
        module.register_forward_pre_hook(partial(outside_graph, self.begin))
        module.register_forward_hook(partial(outside_graph, self.end), always_call=True)

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Leave the common stream."""
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
        """Go on with the common stream."""
        for generator, state in self.before.pop():
            generator.set_state(state)
