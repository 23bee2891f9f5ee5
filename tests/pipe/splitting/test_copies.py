"""Split layers that are copied, pickled or changed: a copy is a plain layer."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from muster.pipe.splitting.halves import WeightQueue
from muster.pipe.splitting.layers import is_split


class Marked(nn.Linear):
    """Defines its own pickling."""

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "mark": "kept"}


def model() -> nn.Sequential:
    """Two layers that share a weight, a nested one, a custom class, and one that refers back to the first."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Conv1d(1, 1, 1), nn.Sequential(nn.Linear(3, 3)), Marked(3, 3))
    layers[2][0].weight = layers[0].weight
    layers[3].__dict__["first"] = layers[0]
    return layers


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deep copy": copy.deepcopy,
    "torch.save": saved,
    **{f"pickle {each}": lambda module, each=each: pickle.loads(pickle.dumps(module, each)) for each in (0, 2, 5)},
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_split_layers_is_a_plain_model(how):
    module = model()
    kinds, x = list(map(type, module.modules())), torch.randn(2, 1, 3)
    with WeightQueue(module) as queue:
        made = COPIES[how](module)
        assert list(map(type, made.modules())) == kinds
        assert not any(map(is_split, made.modules()))
        assert made[2][0].weight is made[0].weight is not module[0].weight
        assert made[3].first is made[0]
        assert made[3].mark == "kept"
        assert torch.equal(made(x), module(x))
        made(x).sum().backward()  # does not use the queue
        assert all(each.grad is not None for each in made.parameters())
        assert all(each.grad is None for each in module.parameters())
        with queue.collecting(0):
            module(x).sum().backward()
        queue.run(0)
        for mine, copied in zip(module.parameters(), made.parameters(), strict=True):
            assert torch.allclose(mine.grad, copied.grad)


def test_a_shallow_copy_of_a_split_layer_is_a_plain_one_with_its_weight():
    layer = nn.Linear(3, 3)
    with WeightQueue(layer):
        made = copy.copy(layer)
        assert type(made) is nn.Linear
        assert not is_split(made)
        assert is_split(layer)
        assert made.weight is layer.weight


class Doubled(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        return given * 2.0


def with_old_norm(layer: nn.Module) -> None:
    nn.utils.weight_norm(layer)


def with_norm(layer: nn.Module) -> None:
    parametrizations.weight_norm(layer)


def with_mask(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", 2)


def with_other_bias(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "bias", Doubled())


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", [with_old_norm, with_norm, with_mask, with_other_bias])
@pytest.mark.parametrize("build", [lambda: nn.Linear(3, 3), lambda: nn.Conv1d(2, 2, 2)], ids=["linear", "convolution"])
def test_a_layer_whose_weight_or_bias_is_computed_is_whole(build, change, when):
    torch.manual_seed(0)
    layer, x = build(), torch.randn(2, 2, 3)
    plain = copy.deepcopy(layer)
    change(plain)
    plain(x).sum().backward()
    if when == "before":
        change(layer)
    with WeightQueue(layer) as queue:
        assert is_split(layer) == (when == "after")
        if when == "after":
            change(layer)
        with queue.collecting(0):
            layer(x).sum().backward()
        queue.run(0)
    wanted = dict(plain.named_parameters())
    assert [*dict(layer.named_parameters())] == [*wanted]
    for name, each in layer.named_parameters():
        assert torch.equal(each.grad, wanted[name].grad), name
    assert torch.equal(layer(x), plain(x))
