"""Shapes at cuts compared with real forwards, and weights of layers compared with formulas."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from muster.jobs.models.shapes import GPT_SHAPES, VGG_SHAPES
from muster.jobs.train.models.gpt import assemble_gpt
from muster.jobs.train.models.vgg import assemble_vgg
from muster.pipe.boundaries import boundary_sizes, weights_of
from muster.pipe.schedules.cuts import balanced, even

BATCH = 2


@pytest.fixture(scope="module")
def vgg16() -> nn.Sequential:
    with torch.device("meta"):  # values are not used, so do not spend time on them
        layers = assemble_vgg(VGG_SHAPES["vgg16"])
    layers.to_empty(device="cpu")
    with torch.no_grad():
        for each in layers.parameters():
            each.zero_()  # uninitialized memory may contain numbers that are slow to compute with
    return layers


@pytest.fixture(scope="module")
def gpt() -> nn.Sequential:
    return assemble_gpt(GPT_SHAPES["gpt-nano"])


@pytest.fixture(scope="module")
def computed(vgg16: nn.Sequential) -> list[Tensor]:
    """Return the real input of every layer of VGG-16."""
    entering, x = [], torch.zeros(BATCH, 3, 32, 32)
    with torch.no_grad():
        for layer in vgg16:
            entering.append(x)
            x = layer(x.clone())
    return entering


@pytest.mark.parametrize("partitions", range(1, 7))
def test_vgg16_in_one_to_six_partitions(vgg16: nn.Sequential, computed: list[Tensor], partitions: int) -> None:
    cuts = even(len(vgg16), partitions)
    wanted = [computed[cut].shape for cut in cuts[1:]]
    found = boundary_sizes(vgg16, (BATCH, 3, 32, 32), partitions)
    assert found == [(shape, shape) for shape in wanted]
    assert len(found) == partitions - 1
    assert boundary_sizes(vgg16, (BATCH, 3, 32, 32), cuts) == found


def test_the_sizes_of_vgg16_as_they_are_drawn(vgg16: nn.Sequential) -> None:
    sizes = [tuple(activation) for activation, _ in boundary_sizes(vgg16, (32, 3, 32, 32), 6)]
    assert sizes == [(32, 128, 16, 16), (32, 256, 8, 8), (32, 256, 4, 4), (32, 512, 4, 4), (32, 512, 2, 2)]


@pytest.mark.parametrize("partitions", [1, 2, 3])
def test_stages_alike_send_one_less_than_their_number(gpt: nn.Sequential, partitions: int) -> None:
    """Equal bytes forward and backward, whatever the number of layers in a stage."""
    tokens_and_width = (BATCH, 64, 64)
    assert boundary_sizes(gpt, (BATCH, 64), partitions) == [(tokens_and_width,) * 2] * (partitions - 1)


def test_nothing_of_the_model_is_touched() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Flatten())
    before = {name: each.clone() for name, each in layers.state_dict().items()}
    random_state = torch.get_rng_state()
    boundary_sizes(layers, (BATCH, 3, 8, 8), 5)
    weights_of(layers, "flops", (BATCH, 3, 8, 8))
    assert all(torch.equal(each, before[name]) for name, each in layers.state_dict().items())
    assert all(each.grad is None and each.device.type == "cpu" for each in layers.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_types_of_what_crosses() -> None:
    class Shift(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return (ids + torch.arange(ids.shape[1])) % 5  # creates a tensor of its own

    layers = nn.Sequential(Shift(), nn.Embedding(5, 4), nn.Linear(4, 3)).double()
    assert boundary_sizes(layers, (BATCH, 6), 3) == [((BATCH, 6), None), ((BATCH, 6, 4),) * 2]  # token ids first
    half = nn.Sequential(nn.Flatten(), nn.Linear(4, 4).bfloat16())
    assert boundary_sizes(half, (BATCH, 2, 2), 2) == [((BATCH, 4),) * 2]


def test_a_layer_that_stands_twice_is_two_layers() -> None:
    shared = nn.ReLU()
    layers = nn.Sequential(nn.Linear(4, 8), shared, nn.Linear(8, 2), shared)
    assert boundary_sizes(layers, (BATCH, 4), 4) == [((BATCH, width),) * 2 for width in (8, 8, 2)]
    assert weights_of(layers, "flops", (BATCH, 4)) == [2 * 2 * BATCH * 4 * 8, 0, 3 * 2 * BATCH * 8 * 2, 0]


def test_parameters_and_counts(gpt: nn.Sequential) -> None:
    shape = GPT_SHAPES["gpt-nano"]
    weights = weights_of(gpt, "parameters")
    tied = shape.vocabulary * shape.d_model  # the weight shared by embedding and head counts in both
    assert sum(weights) == shape.parameter_count() + tied
    assert weights[-1] == tied
    assert weights_of(gpt, "count") == [1] * 5


def test_flops_of_linear_and_convolution_forward_and_backward() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 36, 5))
    convolution = 2 * BATCH * 36 * 8 * 3 * 9
    linear = 2 * BATCH * 8 * 36 * 5
    # The model's input has no gradient, so the first layer's backward has one product, the others' two.
    assert weights_of(layers, "flops", (BATCH, 3, 6, 6)) == [2 * convolution, 0, 0, 3 * linear]


def test_cuts_by_flops_are_closer_than_cuts_by_count(vgg16: nn.Sequential) -> None:
    weights = weights_of(vgg16, "flops", (BATCH, 3, 32, 32))
    cuts = balanced(weights, 4)
    heaviest = [
        max(sum(weights[start:end]) for start, end in pairwise((*each, len(weights))))
        for each in (cuts, even(len(weights), 4))
    ]
    assert heaviest[0] < heaviest[1]
    names = list(vgg16._modules)
    assert all(names[cut].startswith("conv") for cut in cuts)  # after any pool, where the tensor is smallest


def test_a_profile_measures_every_layer_and_leaves_no_trace() -> None:
    layers = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 2)
    )
    layers[0].weight.grad = torch.ones_like(layers[0].weight)
    layers[5].weight.requires_grad_(False)
    before = {name: each.clone() for name, each in layers.state_dict().items()}
    random_state = torch.get_rng_state()
    seconds = weights_of(layers, "profile", (BATCH, 3, 4, 4))
    assert len(seconds) == len(layers)
    assert all(math.isfinite(each) and each > 0 for each in seconds)
    assert all(torch.equal(each, before[name]) for name, each in layers.state_dict().items())
    assert torch.equal(layers[0].weight.grad, torch.ones_like(layers[0].weight))
    assert [name for name, each in layers.named_parameters() if each.grad is not None] == ["0.weight"]
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_profile_times_backwards_too() -> None:
    """Real time is not tested: a fake clock advances when a layer runs."""
    calls = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            calls.append("F")
            return x.clone()

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            calls.append("B")
            return gradient

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Counted.apply(x)

    weights_of(nn.Sequential(nn.Embedding(7, 3), Layer(), nn.Linear(3, 1)), "profile", (BATCH, 5))
    assert set(pairwise(calls)) == {("F", "B"), ("B", "F")}
    assert len(calls) > 2


def test_what_cannot_be_measured_is_said_in_one_line() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    linear = nn.Sequential(nn.Linear(4, 8), nn.Linear(4, 8))
    cases = [
        (lambda: boundary_sizes(linear, (2, 4), 3), r"3 stages of 2 layers: "),
        (lambda: boundary_sizes(linear, (2, 4), 2), r"layer '1' failed on a dummy input of \(2, 8\) float32: "),
        (lambda: boundary_sizes(linear, (2, 4), [0, 5]), r"cuts \[0, 5\]: there is no layer 5, only 2 layers"),
        (lambda: boundary_sizes(linear, (2, 4), [5]), r"cuts \[5\]: there is no layer 5, only 2 layers"),
        (lambda: boundary_sizes(nn.Sequential(Pair(), Pair()), (2, 4), 2), r"layer '0' .* it returns a tuple; only a"),
        (lambda: weights_of(linear, "size"), r"weights by 'size': expected one of count, parameters, flops, profile"),
        (lambda: weights_of(linear, "flops"), r"weights by flops require input_size"),
        (lambda: weights_of(linear, "profile"), r"weights by profile require input_size"),
        (lambda: weights_of(linear, "flops", (2, 4)), r"layer '1' failed on"),
    ]
    for attempt, said in cases:
        with pytest.raises(ValueError, match=said) as refused:
            attempt()
        assert "\n" not in str(refused.value)
