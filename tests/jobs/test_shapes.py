"""Parameter counts, compared with published ones: torch-free sums must equal what the models would hold."""

from dataclasses import replace

import pytest

from muster.jobs.basics.errors import RefusedError
from muster.jobs.models.model_shape import context_of, resolve_shape
from muster.jobs.models.shapes import GPT_SHAPES, POOL, VGG_SHAPES, GptShape
from muster.jobs.spec.train_fields import ModelSettings


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # The usual CIFAR variants of Simonyan & Zisserman's A, B, D, E with batch norm and one linear layer.
        ("vgg11", 9_231_114),
        ("vgg13", 9_416_010),
        ("vgg16", 14_728_266),
        ("vgg19", 20_040_522),
        # torchvision's vgg16 for 10 classes, and with one pixel before the classifier; 8,448 of each are batch norms.
        ("vgg16-4096-7x7", 134_301_514 + 8_448),
        ("vgg16-4096", 33_638_218 + 8_448),
        # Stanford CS336 (2024), assignment 2: vocabulary 10,000, context 128, tied head, no biases.
        ("gpt-small", 92_732_160),
        ("gpt-medium", 312_411_136),
        ("gpt-large", 720_846_080),
        ("gpt-xl", 1_490_920_000),
        ("gpt-2.7b", 2_542_676_480),
    ],
)
def test_a_model_has_the_published_number_of_parameters(name: str, parameters: int) -> None:
    shape = VGG_SHAPES.get(name) or replace(GPT_SHAPES[name], vocabulary=10_000, context=128)
    assert shape.parameter_count() == parameters


@pytest.mark.parametrize("name", VGG_SHAPES)
def test_vgg_has_as_many_weight_layers_as_its_name_says_and_ends_at_one_pixel(name: str) -> None:
    shape = VGG_SHAPES[name]
    convolutions = sum(width != POOL for width in shape.layers)
    # Three linear layers in the paper, one in the variant for 32x32 images.
    assert convolutions + 3 == int(name.removeprefix("vgg").partition("-")[0])
    assert len(shape.linear) == (3 if "4096" in name else 1)
    assert 32 // 2 ** shape.layers.count(POOL) == 1


def test_heads_divide_the_width_in_every_row() -> None:
    assert all(shape.d_model % shape.heads == 0 for shape in GPT_SHAPES.values())


def test_settings_choose_a_row_and_change_it() -> None:
    shape = resolve_shape(ModelSettings(name="gpt-nano", context=32, norm="layer"), 256)
    assert shape == replace(GPT_SHAPES["gpt-nano"], context=32, norm="layer")
    assert resolve_shape(ModelSettings(name="vgg11"), 100) == replace(VGG_SHAPES["vgg11"], classes=100)
    assert resolve_shape(ModelSettings(d_model=8, d_ff=16, layers=1, heads=2), 7) == GptShape(
        "gpt", 8, 16, 1, 2, vocabulary=7
    )


def test_the_context_is_that_of_the_settings_else_of_the_row() -> None:
    assert context_of(ModelSettings(name="gpt-nano", context=9)) == 9
    assert context_of(ModelSettings(name="gpt-nano")) == GPT_SHAPES["gpt-nano"].context
    assert context_of(ModelSettings(d_model=8, d_ff=16, layers=1, heads=2)) == GptShape.context


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ModelSettings(name="vgg11", dropout=0.5), "train.model.dropout: vgg11 has no such setting"),
        (ModelSettings(d_model=9, d_ff=9, layers=1, heads=2), "2 heads do not divide d_model 9"),
        (ModelSettings(name="gpt-nano", vocabulary=3), "vocabulary: 3 is too small for data with 10 classes or tokens"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: ModelSettings, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        resolve_shape(settings, 10)
