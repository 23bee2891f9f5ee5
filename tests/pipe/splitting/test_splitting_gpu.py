"""Split backwards on a GPU: bit for bit with `exact`, close otherwise, in the usual types.

`pytest -m gpu`, one GPU.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

from muster.jobs.models.shapes import GptShape
from muster.jobs.train.models.gpt import TransformerBlock
from muster.pipe.splitting.halves import WeightQueue

pytestmark = pytest.mark.gpu

WIDTH, TOKENS = 256, 128


def blocks(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    shape = GptShape("test", WIDTH, 4 * WIDTH, 2, 4, bias=True, norm="layer")
    return nn.Sequential(TransformerBlock(shape), TransformerBlock(shape)).to("cuda", dtype)


def gradients(module: nn.Module, queue: WeightQueue | None, dtype: torch.dtype, *, autocast: bool) -> list[Tensor]:
    """Run three micro-batches forward and backward; return all gradients."""
    torch.manual_seed(1)
    found = []
    for index in range(3):
        x = torch.randn(2, TOKENS, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = module(x)
        if queue is None:
            y.float().square().mean().backward()
        else:
            with queue.collecting(index):
                y.float().square().mean().backward()
        found.append(x.grad)
    if queue is not None:
        for index in range(3):
            queue.run(index)
    return [*found, *(each.grad for each in module.parameters())]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)]
)
def test_gradients_are_those_of_a_plain_backward(dtype, autocast, exact):
    plain = blocks(dtype)
    ours = copy.deepcopy(plain)
    wanted = gradients(plain, None, dtype, autocast=autocast)
    with WeightQueue(ours, exact=exact) as queue:
        found = gradients(ours, queue, dtype, autocast=autocast)
    apart = [index for index, (a, b) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(a, b)]
    if exact:
        assert apart == []
    largest = max(each.abs().max() for each in wanted)
    most = 1e-5 if dtype == torch.float32 and not autocast else 2e-2
    assert all((a - b).abs().max() <= most * largest for a, b in zip(found, wanted, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from the compiler in torch 2.11 on Python 3.12
def test_compiled_blocks_leave_their_weights_for_later():
    plain = blocks(torch.bfloat16)
    ours = copy.deepcopy(plain)
    wanted = gradients(plain, None, torch.bfloat16, autocast=False)
    torch._dynamo.reset()
    with WeightQueue(ours) as queue:
        for block in ours:
            block.compile()
        found = gradients(ours, queue, torch.bfloat16, autocast=False)
    largest = max(each.abs().max() for each in wanted)
    assert all((a - b).abs().max() <= 4e-2 * largest for a, b in zip(found, wanted, strict=True))
