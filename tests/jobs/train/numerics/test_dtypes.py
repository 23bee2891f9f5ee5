"""The table of dtypes against the answers that Stanford CS336 (assignment 2, mixed precision) asks for."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from muster.jobs.models.shapes import POOL, VggShape
from muster.jobs.train.models.vgg import build_vgg
from muster.jobs.train.numerics import Numerics
from muster.jobs.train.numerics.dtypes import DtypeRow, dtype_rows


def toy() -> nn.Module:
    layers = [("fc1", nn.Linear(8, 10, bias=False)), ("relu", nn.ReLU()), ("ln", nn.LayerNorm(10))]
    return nn.Sequential(OrderedDict([*layers, ("fc2", nn.Linear(10, 5, bias=False))]))


def rows_on(device: torch.device) -> dict[str, DtypeRow]:
    numerics = Numerics("fp16", device)
    batch = torch.randn(4, 8, device=device), torch.randint(5, (4,), device=device)
    return {row.layer: row for row in dtype_rows(toy().to(device), *batch, numerics)}


@pytest.mark.parametrize(
    ("device", "norm"), [("cpu", "float16"), pytest.param("cuda", "float32", marks=pytest.mark.gpu)]
)
def test_the_toy_model_under_fp16_autocast(device, norm):
    rows = rows_on(torch.device(device))
    assert {row.parameters for name, row in rows.items() if name not in ("relu", "loss")} == {"float32"}
    assert {row.gradients for name, row in rows.items() if name not in ("relu", "loss")} == {"float32"}
    assert rows["fc1"].output == "float16"
    assert rows["ln"].output == norm
    assert rows["fc2"].output == rows["loss"].input == "float16"
    assert rows["loss"].output == "float32"


def test_batch_norms_stay_in_float32_among_bfloat16():
    numerics = Numerics("pure_bf16", torch.device("cpu"))
    model = numerics.place(build_vgg(VggShape("tiny", (8, POOL, 8, POOL, 8, POOL, 8, POOL, 8, POOL)), seed=0))
    batch = torch.randn(4, 3, 32, 32, dtype=torch.bfloat16), torch.randint(10, (4,))
    rows = {row.layer: row for row in dtype_rows(model, *batch, numerics)}
    assert rows["conv1"] == DtypeRow("conv1", "Conv2d", *["bfloat16"] * 4)
    assert rows["norm1"] == DtypeRow("norm1", "BatchNorm2d", "float32", "bfloat16", "bfloat16", "float32")
    assert model.get_buffer("norm1.running_mean").dtype == torch.float32
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
