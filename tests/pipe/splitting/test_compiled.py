"""Compiled blocks can be split: a custom operation in their backward keeps the inputs of weight gradients."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from muster.pipe.splitting import compiled as split_compiled
from muster.pipe.splitting import layers
from muster.pipe.splitting.halves import WeightQueue


class Block(nn.Module):
    """A typical block: a norm, two linear layers, a residual addition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1, padding_mode="circular")
    )


# Warnings from torch's compiler about torch itself.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch._dynamo.reset()


def run(blocks: list[nn.Module], batches: list[Tensor], compiled: Callable, queue: WeightQueue | None) -> list[Tensor]:
    """Run micro-batches forward and backward through compiled blocks; return outputs and gradients of inputs."""
    seen = []
    for index, given in enumerate(batches):
        x = given.detach().requires_grad_()
        y = x
        for block in blocks:
            y = compiled(block, y)
        with nullcontext() if queue is None else queue.collecting(index):
            y.square().sum().backward()
        seen += [y.detach(), x.grad]
    if queue is not None:
        assert all(len(works) == 2 * len(blocks) for works in queue._works.values())
        for index in range(len(batches)):
            queue.run(index)
        queue.finish()
    return seen


@pytest.mark.parametrize(("build", "shape"), [(Block, (2, 3, 8)), (convolutions, (2, 2, 6, 6))])
def test_equal_blocks_share_one_compiled_backward_that_leaves_their_weights_for_later(build, shape):
    torch.manual_seed(0)
    plain = [build() for _ in range(3)]
    ours = copy.deepcopy(plain)
    batches = [torch.randn(shape) for _ in range(3)]
    wanted = run(plain, batches, lambda block, x: block(x), None)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda block, x: block(x), backend=counter, fullgraph=True)
    with WeightQueue(nn.ModuleList(ours), exact=True) as queue:
        seen = run(ours, batches, compiled, queue)
    assert counter.frame_count == 1
    assert all(map(torch.equal, seen, wanted))
    for block, other in zip(ours, plain, strict=True):
        for (name, mine), theirs in zip(block.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad), name


def test_what_compiled_code_hands_over_is_copied():
    block = nn.Linear(4, 4)
    with WeightQueue(block) as queue:
        place = block.__dict__[layers.PLACE]
        gradient, x = torch.ones(2, 4), torch.ones(2, 4)
        with queue.collecting(0):
            split_compiled.input_gradient(gradient, x, block.weight.detach(), place)
        gradient.fill_(7)
        x.fill_(7)
        queue.run(0)
    assert torch.equal(block.weight.grad, torch.full((4, 4), 2.0))
    with pytest.raises(RuntimeError, match="the backward of a layer that is no longer split"):
        split_compiled.input_gradient(gradient, x, block.weight.detach(), place)


def test_an_input_that_needs_no_gradient_leaves_a_compiled_layer_whole():
    torch.manual_seed(0)
    ours, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    plain = copy.deepcopy(ours)
    plain(x).sum().backward()
    with WeightQueue(ours) as queue:
        y = torch.compile(ours, backend="aot_eager", fullgraph=True)(x)
        with queue.collecting(0):
            y.sum().backward()
        assert torch.equal(ours[0].weight.grad, plain[0].weight.grad)
        queue.run(0)
    assert torch.equal(ours[0].weight.grad, plain[0].weight.grad)
