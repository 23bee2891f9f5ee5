"""Seeds for dropout. If a model's layers are on several ranks, every layer has its own seed.

A rank with layers 5 to 8 cannot know how many random numbers earlier layers have used. So in a pipeline, seeds depend
on (seed, step, virtual rank, micro-batch, layer), and are the same for any cut of the model, and in one process. Modes
with all layers on each rank seed once per micro-batch.
"""

from functools import partial
from typing import Any

from torch import nn

from muster.jobs.train.rng.keyed import DROPOUT, key
from muster.pipe.rng_streams import seed_generators


def forward_seed(seed: int, step: int, virtual_rank: int, microbatch: int) -> int:
    """Return the seed for a forward of all layers."""
    return key(seed, DROPOUT, step, virtual_rank, microbatch)


def layer_seed(seed: int, step: int, virtual_rank: int, microbatch: int, layer: int) -> int:
    """Return the seed for one layer in one forward."""
    return key(seed, DROPOUT, step, virtual_rank, microbatch, layer)


class LayerSeeds:
    """Hooks that seed the generators before every layer of a training forward, for the reference in one process."""

    def __init__(self, layers: nn.Sequential, seed: int) -> None:
        self.seed = seed
        self._at = (0, 0, 0)
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._seed, number))

    def enter(self, step: int, virtual_rank: int, microbatch: int) -> None:
        """Set the position of the next forward."""
        self._at = (step, virtual_rank, microbatch)

    def _seed(self, number: int, layer: nn.Module, inputs: Any) -> None:
        if layer.training:
            seed_generators(layer_seed(self.seed, *self._at, number))
