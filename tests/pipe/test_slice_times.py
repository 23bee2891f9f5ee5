"""Times of slices: the fit has the shape of what was measured, and the layers stay as they are."""

import torch
from torch import nn

from muster.jobs.models.shapes import GptShape
from muster.jobs.train.models.gpt import TransformerBlock
from muster.pipe.slice_times import slice_times


def test_a_block_is_measured_without_a_trace() -> None:
    torch.manual_seed(0)
    block = TransformerBlock(GptShape("gpt", d_model=32, d_ff=64, layers=1, heads=2, context=64))
    layers = nn.Sequential(block)
    kept = {name: each.detach().clone() for name, each in layers.named_parameters()}
    state = torch.get_rng_state()
    times = slice_times(layers, torch.ones(2, 64, 32))
    assert times(0, 64) > 0.0
    assert times(48, 16) >= times(0, 16)
    assert all(torch.equal(each, kept[name]) and each.grad is None for name, each in layers.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)
