"""A rank waits for another only if it needs something from it, not because a step begins or ends."""

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from muster.jobs.world.world import World
from muster.pipe.pipeline import Pipeline
from muster.pipe.schedules.tables import schedule

pytestmark = pytest.mark.ranks

LIMIT = timedelta(seconds=20)  # turns an endless wait into an error


def waiting(world: World) -> list[float]:
    """Let each rank do what would hang if steps began or ended on all ranks together."""
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    pipeline = Pipeline(layers, schedule("1f1b", 2, 4), loss=functional.cross_entropy)
    store: Any = world.group.get_group_store()
    inputs, targets = torch.randn(8, 4), torch.zeros(8, dtype=torch.int64)
    losses = [pipeline.step(inputs, targets).item()]  # exchanges headers, and posts receives
    pipeline.evaluate(inputs)

    if world.rank == 0:
        # The last rank has finished its step while this one is still in the same step.
        pipeline.on_last_backward = lambda stage: store.wait(["pipe waits: last rank is through"], LIMIT)
        losses.append(pipeline.step(inputs, targets).item())
        pipeline.on_last_backward = None
        # This rank begins a step that the other one has not reached yet.
        pipeline.hooks.on_forward = lambda stage, microbatch: store.set("pipe waits: first rank has begun", "")
    else:
        losses.append(pipeline.step(inputs, targets).item())
        store.set("pipe waits: last rank is through", "")
        store.wait(["pipe waits: first rank has begun"], LIMIT)
    losses.append(pipeline.step(inputs, targets).item())
    return losses


def test_ranks_neither_begin_nor_end_a_step_together(on_ranks):
    first, last = on_ranks(2, waiting)
    assert first == last
    assert len(set(first)) == 1  # there was no optimizer step
