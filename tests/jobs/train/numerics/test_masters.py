"""Masters are float32, step as AdamW steps, and are what a checkpoint goes on from."""

import pytest
import torch
from torch import nn

from muster.jobs.spec.train_fields import ModelSettings, OptimizerSettings
from muster.jobs.train.models import build_model
from muster.jobs.train.numerics import Numerics
from muster.jobs.train.numerics.optim import clip, gradients_of, set_learning_rate

CPU = torch.device("cpu")
ADAMW = OptimizerSettings(name="adamw", lr=1e-3, weight_decay=0.1)
SGD = OptimizerSettings(name="sgd", lr=1e-2, momentum=0.9, weight_decay=0.1)
PURE = Numerics("pure_bf16", CPU)


def backward(model: nn.Module, step: int) -> None:
    tokens = torch.randint(32, (3, 64), generator=torch.Generator().manual_seed(step))
    model.zero_grad(set_to_none=True)
    PURE.loss(model, tokens, tokens.roll(-1, 1)).backward()


def gpt() -> nn.Module:
    return PURE.place(build_model(ModelSettings(name="gpt-nano"), vocabulary=32, seed=0))


@pytest.mark.parametrize("settings", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_masters_have_the_bits_of_a_float32_optimizer_stepped_by_hand_on_the_same_gradients(settings):
    model = gpt()
    optimizer = PURE.optimizer(model.parameters(), settings)
    by_hand = [nn.Parameter(each.detach().float()) for each in model.parameters()]
    plain = (
        torch.optim.AdamW(by_hand, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        if settings is ADAMW
        else torch.optim.SGD(by_hand, lr=1e-2, momentum=0.9, weight_decay=0.1, fused=True)
    )
    for step in range(4):
        backward(model, step)
        set_learning_rate(optimizer, 1e-3 * (step + 1))
        plain.param_groups[0]["lr"] = 1e-3 * (step + 1)
        for mine, low in zip(by_hand, model.parameters(), strict=True):
            assert low.grad.dtype == torch.bfloat16
            mine.grad = low.grad.float()
        optimizer.step()
        plain.step()
    for mine, low in zip(by_hand, model.parameters(), strict=True):
        assert torch.equal(optimizer.state[low]["master"], mine)
        assert torch.equal(low, mine.bfloat16())
        for key, value in plain.state[mine].items():
            assert torch.equal(optimizer.state[low][key], value), key


def test_updates_too_small_for_bfloat16_add_up_in_the_masters():
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = PURE.optimizer([weight], OptimizerSettings(name="sgd", lr=1e-3))
    for _ in range(10):  # 1 - 0.001 is 1 in bfloat16, whose next number is 0.996
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert optimizer.state[weight]["master"].tolist() == pytest.approx([0.99] * 4)
    assert weight.tolist() == pytest.approx([0.99] * 4, abs=2e-3)


def test_a_parameter_without_a_gradient_and_a_frozen_one_stay_as_they_are():
    used, unused, frozen, wide = (nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(4))
    wide.data = wide.data.float()  # as a batch norm's
    frozen.requires_grad_(False)
    optimizer = PURE.optimizer([used, unused, frozen, wide], OptimizerSettings(name="adamw", lr=0.5))
    assert "master" not in optimizer.state[wide]
    assert frozen not in optimizer.state
    used.grad, wide.grad = torch.ones_like(used), torch.ones_like(wide)
    optimizer.step()
    assert [each[0].item() for each in (used, unused, frozen, wide)] == [0.5, 1.0, 1.0, 0.5]


def test_clipping_measures_16_bit_gradients_in_float32():
    parameters = [nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.01)
    exact = float(torch.cat([each.grad for each in parameters]).double().norm())
    before = clip(gradients_of(parameters), exact / 2)
    assert before.dtype == torch.float64
    assert float(before) == pytest.approx(exact, rel=1e-5)
    assert float(torch.cat([each.grad for each in parameters]).double().norm()) == pytest.approx(exact / 2, rel=4e-3)
    kept = [each.grad.clone() for each in parameters]
    clip(gradients_of(parameters), 2 * exact)
    assert all(torch.equal(each.grad, old) for each, old in zip(parameters, kept, strict=True))
