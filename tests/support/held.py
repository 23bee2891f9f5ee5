"""States of models that are held by hand, without ranks: what each would save and read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from muster.jobs.train.parallel.forms import Forms
from muster.jobs.train.parallel.layers import whole_layers
from muster.jobs.train.parallel.replica import Replica
from muster.jobs.train.parallel.state import ModelState
from muster.jobs.train.profiling.clock import clock_for
from muster.jobs.world.world import World
from muster.zero.flat import ParameterRange

CPU = torch.device("cpu")


class SharedOut(Replica):
    """A replica that lists ranges."""

    held: Callable[[], Sequence[ParameterRange]]

    def ranges(self, optimizer: torch.optim.Optimizer) -> Sequence[ParameterRange]:
        """List them."""
        return self.held()


def held_state(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rank: int = 0,
    ranks: int = 1,
    more: Mapping[str, Tensor] = MappingProxyType({}),
    forms: Forms | None = None,
    pipe_rank: int = 0,
    held: Callable[[], Sequence[ParameterRange]] | None = None,
) -> ModelState:
    """Return the state of a rank among some that have the same layers: of two stages those of one, if so asked."""
    data = World(rank, ranks, None, CPU)
    replica = Replica(module, data, clock_for(CPU))
    if held is not None:
        replica = SharedOut(module, data, clock_for(CPU))
        replica.held = held
    world = replace(data, rank=pipe_rank * ranks + rank, size=2 * ranks, pipe=2) if forms is not None else data
    return ModelState(replica, optimizer, whole_layers(forms or Forms(module), world), world, more)
