"""Which kind a module has, by its class and its names, and that marks leave nothing behind."""

import pytest
import torch
from torch import nn
from torch.nn.modules import module as of_torch
from torch.profiler import profile

from muster.jobs.models.shapes import GptShape
from muster.jobs.train.models.gpt import assemble_gpt
from muster.jobs.train.profiling.marking import Marks, Subject, texts_of


class SelfAttention(nn.Module):
    """Told by its class."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.q_norm = nn.RMSNorm(4)


class Layer(nn.Module):
    """A block as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = SelfAttention()
        self.self_attn = nn.MultiheadAttention(4, 2)
        self.ln_1 = nn.LayerNorm(4)
        self.ffn = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.skip = nn.Linear(4, 4)


class AttentionModel(nn.Module):
    """The class of the whole model tells nothing of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(8, 4)
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.ReLU())
        self.layers = nn.ModuleList([Layer()])
        self.out = nn.Linear(4, 8)


def kinds(model: nn.Module, *, has_last: bool = True) -> dict[str, str]:
    texts = texts_of(model, has_last=has_last).values()
    return {name: kind for _, kind, name in (text.split(" ", 2) for text in texts)}


def test_kinds_of_a_user_s_model() -> None:
    assert kinds(AttentionModel()) == {
        "AttentionModel": "other",
        "wte": "embedding",
        "stem": "other",
        "stem.0": "convolution",
        "stem.1": "norm",
        "stem.2": "pooling",
        "stem.3": "other",
        "layers": "other",
        "layers.0": "other",
        "layers.0.mix": "attention",
        "layers.0.mix.proj": "attention",
        "layers.0.mix.q_norm": "norm",
        "layers.0.self_attn": "attention",
        "layers.0.self_attn.out_proj": "attention",
        "layers.0.ln_1": "norm",
        "layers.0.ffn": "mlp",
        "layers.0.ffn.0": "mlp",
        "layers.0.ffn.1": "mlp",
        "layers.0.ffn.2": "mlp",
        "layers.0.skip": "other",
        "out": "head",
    }
    assert kinds(AttentionModel(), has_last=False)["out"] == "other"  # a stage before the last


def test_a_stage_that_ends_with_an_mlp_has_no_head() -> None:
    shape = GptShape("micro", d_model=8, d_ff=16, layers=1, heads=2, context=4, vocabulary=8)
    assert kinds(assemble_gpt(shape))["head"] == "head"
    stage = assemble_gpt(shape)[:2]
    assert kinds(stage)["block1.mlp.down"] == "mlp"
    assert "head" not in kinds(stage).values()


def test_marks_end_when_they_are_stopped_and_when_a_forward_fails() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(5))
    marks = Marks(Subject(model, dict, has_last=True))
    with profile() as profiler:
        marks.start()
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 4))
        nn.CrossEntropyLoss()(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))
        marks.stop()
        marks.stop()
        model[0](torch.ones(2, 4))
    names = [event.name for event in profiler.events() if event.name.startswith("module ")]
    assert names == ["module other Sequential", "module head 0", "module norm 1", "module loss CrossEntropyLoss"]
    assert not of_torch._global_forward_hooks
    assert not of_torch._global_forward_pre_hooks
