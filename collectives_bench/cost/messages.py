"""The exchanges within the forward and backward of one micro-batch: of split layers, and of sharded parameters. Pure.

    tensor    embedding | attention, MLP | head, cross-entropy | head | MLP, attention |
    zero3     gather 0, 1, 2 | gather 1 | scatter 2, 1, 0      the root, 0, stays; the last one, too, except in fsdp

A test compares these lists with the collectives that the engine runs.
"""

from collections.abc import Sequence
from typing import Final

from muster.collectives_bench.cost.load import RankLoad

SUM: Final = "all_reduce"
GATHER: Final = "all_gather"
SCATTER: Final = "reduce_scatter"
LEAST_WIDE: Final = 4  # bytes per element of a cross-entropy, which is computed in float32 or wider


def between_layers(load: RankLoad, samples: float) -> list[tuple[str, int]]:
    """List the operations and bytes of a GPT whose layers are split over ranks, for a micro-batch of `samples`."""
    model, rows = load.model, samples * load.model.tokens
    stream = round(rows * model.width * load.itemsize)
    wide = max(load.itemsize, LEAST_WIDE)
    once = [round(each) for each in (rows * model.width * load.recipe.parameter, rows * wide, 2 * rows * wide)]
    forwards = 2 if load.recompute else 1
    if not load.sequence:
        return [(SUM, each) for each in (*once, *[stream] * (2 * (forwards + 1) * model.blocks + 1))]
    once += [tensor.elements * load.recipe.gradient for tensor in model.tensors if "norm" in tensor.name]
    gathers, scatters = 2 * (forwards + 2) * model.blocks + 3, 2 * (forwards + 1) * model.blocks + 1
    return [(SUM, each) for each in once] + [(GATHER, stream)] * gathers + [(SCATTER, stream)] * scatters


def kept_units(load: RankLoad, units: int, *, keeps_last: bool) -> Sequence[bool]:
    """Tell for each unit of sharded parameters whether the backward still has it from the forward.

    The root unit has everything around the blocks of a model. Convolutional networks have none.
    """
    root = load.model.blocks > 0 or units == 1
    return [not load.reshard or (root and n == 0) or (keeps_last and n == units - 1) for n in range(units)]
