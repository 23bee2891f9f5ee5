import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from muster.jobs.basics.errors import RefusedError
from muster.jobs.models.model_shape import resolve_shape
from muster.jobs.models.shapes import GPT_SHAPES, VGG_SHAPES, GptShape
from muster.jobs.spec.train_fields import ModelSettings
from muster.jobs.train.models import build_model
from muster.jobs.train.models.gpt import assemble_gpt, build_gpt
from muster.jobs.train.models.vgg import assemble_vgg

TINY = GptShape("tiny", d_model=16, d_ff=32, layers=2, heads=4, context=8, vocabulary=11)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_vgg11_has_the_parameters_of_the_usual_cifar_variant():
    model = build_model(ModelSettings(name="vgg11"), vocabulary=10, seed=0)
    assert parameters(model) == 9_231_114


@pytest.mark.parametrize("name", VGG_SHAPES)
def test_a_vgg_has_as_many_parameters_as_its_row_says(name: str):
    with torch.device("meta"):
        model = assemble_vgg(replace(VGG_SHAPES[name], classes=100))
    assert parameters(model) == replace(VGG_SHAPES[name], classes=100).parameter_count()


@pytest.mark.parametrize("name", GPT_SHAPES)
def test_a_gpt_has_as_many_parameters_as_its_row_says(name: str):
    with torch.device("meta"):
        model = assemble_gpt(GPT_SHAPES[name])
    assert parameters(model) == GPT_SHAPES[name].parameter_count()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_every_variant_of_a_gpt_is_counted_right(tied: bool, bias: bool, norm):
    shape = replace(TINY, tied=tied, bias=bias, norm=norm)
    assert parameters(assemble_gpt(shape)) == shape.parameter_count()


def test_a_block_has_eight_tensors_as_cs336_counts():
    assert len(list(assemble_gpt(TINY).get_submodule("block1").parameters())) == 8


def test_children_are_named_in_order():
    vgg = assemble_vgg(VGG_SHAPES["vgg11"])
    names = [name for name, _ in vgg.named_children()]
    assert names[:8] == ["conv1", "norm1", "relu1", "pool1", "conv2", "norm2", "relu2", "pool2"]
    assert names[-5:] == ["norm8", "relu8", "pool5", "flatten", "head"]
    assert [name for name, _ in assemble_gpt(TINY).named_children()] == ["embed", "block1", "block2", "norm", "head"]


@pytest.mark.parametrize(("name", "cut"), [("vgg11", 11), ("gpt-nano", 2)])
def test_a_model_can_be_cut_into_stages_that_keep_their_names(name: str, cut: int):
    model = build_model(ModelSettings(name=name), vocabulary=16, seed=1).eval()
    x = torch.randn(2, 3, 32, 32) if name == "vgg11" else torch.randint(16, (2, 64))
    first, second = model[:cut], model[cut:]
    assert torch.equal(second(first(x)), model(x))
    assert {*first.state_dict(), *second.state_dict()} == set(model.state_dict())


def test_images_become_logits_of_classes():
    model = build_model(ModelSettings(name="vgg13", vocabulary=12), vocabulary=10, seed=0)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 12)


def test_tokens_become_logits_of_the_vocabulary_also_when_short():
    model = build_gpt(TINY, seed=0)
    for tokens in (8, 3):
        assert model(torch.randint(11, (2, tokens))).shape == (2, tokens, 11)


def test_a_gpt_equals_attention_written_out_by_hand():
    shape = replace(TINY, norm="layer", bias=True, tied=False, layers=1)
    model = build_gpt(shape, seed=4).double()
    tokens = torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(tokens), by_hand(shape, dict(model.named_parameters()), tokens))


def by_hand(shape: GptShape, p: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Compute one block position by position and head by head, from the paper's formulas."""

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    width = shape.d_model // shape.heads
    x = p["embed.token.weight"][tokens] + p["embed.position.weight"]
    y = norm(x, "block1.norm1")
    q, k, v = (linear(y, f"block1.attention.{name}") for name in ("query", "key", "value"))
    mixed = torch.zeros_like(x)
    for head in range(shape.heads):
        piece = slice(head * width, (head + 1) * width)
        for t in range(tokens.shape[1]):
            scores = (q[:, t, None, piece] * k[:, : t + 1, piece]).sum(-1) / math.sqrt(width)
            mixed[:, t, piece] = (scores.softmax(-1)[:, :, None] * v[:, : t + 1, piece]).sum(1)
    x = x + linear(mixed, "block1.attention.output")
    x = x + linear(functional.gelu(linear(norm(x, "block1.norm2"), "block1.mlp.up")), "block1.mlp.down")
    return linear(norm(x, "norm"), "head")


def test_a_position_never_sees_those_after_it():
    model = build_gpt(TINY, seed=0)
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = 10
    same = (model(tokens) == model(changed)).all(-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 3


def test_a_tied_head_is_the_embedding_and_an_untied_one_is_not():
    tied, untied = build_gpt(TINY, seed=0), build_gpt(replace(TINY, tied=False), seed=0)
    assert tied.get_parameter("head.weight") is tied.get_parameter("embed.token.weight")
    assert untied.get_parameter("head.weight") is not untied.get_parameter("embed.token.weight")


def test_a_tied_head_stays_tied_after_one_step():
    model = build_gpt(TINY, seed=0).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(8)[None]).square().mean().backward()
    optimizer.step()
    assert torch.equal(model.get_parameter("head.weight"), model.get_parameter("embed.token.weight"))


@pytest.mark.parametrize("name", ["vgg11", "gpt-nano"])
def test_first_values_are_a_function_of_the_seed_and_leave_torch_s_own_draws_alone(name: str):
    settings = ModelSettings(name=name)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_model(settings, vocabulary=16, seed=7).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = build_model(settings, vocabulary=16, seed=7).state_dict()
    other = build_model(settings, vocabulary=16, seed=8).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_a_gpt_starts_as_gpt_2_did():
    shape = replace(GPT_SHAPES["gpt-micro"], bias=True, norm="layer")
    model = build_gpt(shape, seed=0)
    std = {name: float(parameter.detach().std()) for name, parameter in model.named_parameters()}
    assert std["embed.token.weight"] == pytest.approx(0.02, rel=0.02)
    assert std["block1.mlp.up.weight"] == pytest.approx(0.02, rel=0.02)
    assert std["block4.mlp.down.weight"] == pytest.approx(0.02 / math.sqrt(8), rel=0.02)
    assert std["block1.attention.output.weight"] == pytest.approx(0.02 / math.sqrt(8), rel=0.02)
    assert all(not parameter.any() for name, parameter in model.named_parameters() if name.endswith("bias"))
    tokens = torch.randint(256, (4, 128), generator=torch.Generator().manual_seed(0))
    loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    assert float(loss.detach()) == pytest.approx(math.log(256), abs=0.2)


def test_dropout_acts_in_training_only():
    model = build_gpt(replace(TINY, dropout=0.5), seed=0)
    tokens = torch.arange(8)[None]
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_settings_override_a_row():
    settings = ModelSettings(
        name="gpt-nano", context=32, vocabulary=300, tied=False, bias=True, norm="layer", dropout=0.1
    )
    assert resolve_shape(settings, 256) == GptShape(
        "gpt-nano", 64, 256, 2, 2, context=32, vocabulary=300, tied=False, bias=True, norm="layer", dropout=0.1
    )


def test_explicit_sizes_make_a_gpt_of_the_data_s_vocabulary():
    settings = ModelSettings(d_model=8, d_ff=16, layers=1, heads=2)
    assert resolve_shape(settings, 50) == GptShape("gpt", 8, 16, 1, 2, context=128, vocabulary=50)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ModelSettings(name="gpt-nano", vocabulary=255), r"vocabulary: 255 is too small .* use at least 256"),
        (ModelSettings(name="vgg11", vocabulary=255), r"vocabulary: 255 is too small"),
        (ModelSettings(d_model=10, d_ff=16, layers=1, heads=3), "3 heads do not divide d_model 10"),
        (ModelSettings(name="vgg11", context=64), "context: vgg11 has no such setting"),
        (ModelSettings(name="vgg11", dropout=0.5), "dropout: vgg11 has no such setting"),
    ],
)
def test_what_does_not_fit_is_refused(settings: ModelSettings, message: str):
    with pytest.raises(RefusedError, match=message):
        build_model(settings, vocabulary=256, seed=0)
