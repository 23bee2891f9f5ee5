"""Seeds for dropout. If a model's layers are on several ranks, every layer has its own seed, by its number.

A rank with layers 5 to 8 cannot know how many random numbers earlier layers have used. So if layers are split, seeds
are
functions of (seed, step, virtual rank, micro-batch, layer): the same however the model is cut, and in one process.
Modes
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
    """Seeds the generators before every layer of a training forward, on one process."""

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
