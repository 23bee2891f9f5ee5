"""How far rounding reaches in a step: not less than orders of summation do, and by far less than a mistake does."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from muster.jobs.spec.train_fields import ModelSettings
from muster.jobs.train.models import build_model
from muster.jobs.train.models.stack import LayerStack
from muster.jobs.train.rounding import Rounding
from support.soak import only_some

pytestmark = pytest.mark.slow

SETTINGS = {"d_model": 32, "d_ff": 64, "layers": 2, "heads": 4, "context": 16, "bias": True}


def model_and_batch(dtype: torch.dtype) -> tuple[LayerStack, torch.Tensor]:
    model = build_model(ModelSettings.model_validate(SETTINGS), vocabulary=24, seed=1).to(dtype)
    return model, torch.randint(24, (2, 6, 16), generator=torch.Generator().manual_seed(2))


def values(model: LayerStack, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the loss, and the gradients of a step."""
    model.zero_grad(set_to_none=True)
    loss = model(tokens[0], tokens[1])
    loss.backward()
    return {"loss": loss.detach(), **{name: each.grad.clone() for name, each in model.named_parameters()}}


def in_three_parts(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Return a layer's outputs, the terms of each added up in three parts, as three ranks would."""
    parts = zip(x.tensor_split(3, -1), layer.weight.tensor_split(3, 1), strict=True)
    first, second, third = (functional.linear(*each) for each in parts)
    y = (first + second) + third
    return y if layer.bias is None else y + layer.bias


@pytest.mark.parametrize(
    "dtype", only_some([torch.float32, torch.float64, torch.bfloat16], [torch.float32, torch.bfloat16])
)
def test_another_order_stays_within_it_and_a_mistake_does_not(dtype):
    model, tokens = model_and_batch(dtype)
    at_rest = values(model, tokens)
    reach = Rounding(model).reach(lambda: values(model, tokens))
    again = values(model, tokens)
    assert all(torch.equal(each, again[name]) for name, each in at_rest.items()), "what was moved is as it was"
    for each in model.modules():
        if isinstance(each, nn.Linear):
            each.forward = lambda x, layer=each: in_three_parts(layer, x)
    moved = values(model, tokens)
    distance = {name: float((each - moved[name]).abs().max()) for name, each in at_rest.items()}
    assert all(distance[name] <= bound for name, bound in reach.items()), (distance, reach)
    assert sum(each > 0.0 for each in distance.values()) > len(distance) / 2, "else this shows nothing"
    model[1].mlp.down.forward = lambda x: 1.02 * functional.linear(x, model[1].mlp.down.weight, model[1].mlp.down.bias)
    wrong = values(model, tokens)
    if dtype != torch.bfloat16:  # whose numbers are a hundredth apart
        late = {name for name, bound in reach.items() if float((at_rest[name] - wrong[name]).abs().max()) > bound}
        assert late >= {"block1.mlp.down.weight", "block1.mlp.up.weight"}


def test_where_nothing_is_moved_draws_are_those_of_others():
    model, tokens = model_and_batch(torch.float32)
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    Rounding(model).reach(lambda: values(model, tokens))
    assert torch.equal(torch.rand(4), wanted), "dropout would draw otherwise"
