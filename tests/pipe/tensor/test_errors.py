"""Impossible splits are refused with numbers, before anything is sent or changed."""

import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from muster.jobs.models.shapes import VGG_SHAPES, GptShape
from muster.jobs.train.models.gpt import assemble_gpt
from muster.jobs.train.models.tensor_plan import GPT_PLAN, split_gpt
from muster.jobs.train.models.vgg import build_vgg
from muster.jobs.world.world import World
from muster.pipe.tensor import Column, Heads, Row, SplitCrossEntropy, Vocabulary, parallelize
from muster.pipe.tensor.region import Region
from support.refusals import said_by
from support.tensor_parallel import SHAPE, Case, build, split


class Grouped(nn.Module):
    """Attention with fewer heads of keys and values than of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.pairs = 6, 2
        self.query, self.pair = nn.Linear(6, 36), nn.Linear(6, 12)


def refused(world: World) -> dict[str, str]:
    """Return the errors on three ranks for models that they cannot split. Nothing may be sent or changed."""
    found = {}

    def ask(name: str, model: nn.Module, plan: dict, **settings: bool) -> None:
        before = {each: tuple(value.shape) for each, value in model.state_dict().items()}
        kinds = [type(each) for each in model.modules()]
        with mock.patch.object(dist, "broadcast", side_effect=AssertionError("sent")):
            found[name] = said_by(lambda: parallelize(model, plan, world.group, **settings), ValueError)
        assert before == {each: tuple(value.shape) for each, value in model.state_dict().items()}
        assert kinds == [type(each) for each in model.modules()]

    def gpt(**changes: int) -> nn.Module:
        return assemble_gpt(GptShape(**{**SHAPE, "d_model": 12, "heads": 3, "d_ff": 24, "vocabulary": 27, **changes}))

    ask("heads", gpt(heads=4), GPT_PLAN)
    ask("d_ff", gpt(d_ff=32), GPT_PLAN)
    ask("vocabulary", gpt(vocabulary=256, tied=False), GPT_PLAN)
    ask("nowhere", gpt(), {**GPT_PLAN, "block*.mlp.gate": Column()})
    ask("shared", gpt(tied=True), {"embed.token": Vocabulary()})
    ask("shared otherwise", gpt(tied=True), {"embed.token": Vocabulary(), "head": Row()})
    ask("kind", nn.Sequential(nn.Conv2d(3, 3, 1)), {"0": Row()})
    ask("subclass", nn.Sequential(nn.modules.linear.NonDynamicallyQuantizableLinear(3, 3)), {"0": Column()})
    ask("two rows", gpt(), {"block1.mlp.up": Column(), "block*.mlp.up": Row()})
    ask("cut twice", gpt(), {"block1.attention": Heads("heads", ("query",)), "block1.attention.query": Row()})
    ask("no heads", gpt(), {"block1.attention": Heads("queries", ("query", "keys"))})
    ask("no linear", nn.Sequential(nn.ReLU()), {"0": Column()})
    ask("no row", gpt(), {"head": "column"})
    ask("grouped", Grouped(), {"": Heads(("heads", "pairs"), ("query", "pair"))})
    ask("padding", nn.Sequential(nn.Embedding(3, 4, padding_idx=0)), {"0": Vocabulary()})
    return found


WANTED = {
    "heads": "block1.attention: 4 heads cannot be split evenly over 3 ranks; use a multiple of 3, such as 6",
    "d_ff": "block1.mlp.up: 32 outputs cannot be split evenly over 3 ranks; use a multiple of 3, such as 33; "
    "block1.mlp.down: 32 inputs cannot be split evenly over 3 ranks; use a multiple of 3, such as 33",
    "vocabulary": "embed.token: 256 tokens of its vocabulary cannot be split evenly over 3 ranks; use a multiple of 3, "
    "such as 258; head: 256 tokens of its vocabulary cannot be split evenly over 3 ranks; use a multiple of 3, such as "
    "258",
    "nowhere": "plan: 'block*.mlp.gate' matches no module; the model has embed, block1, norm, head",
    "shared": "embed.token.weight (split along dimension 0) and head.weight (whole) are the same parameter; "
    "split both in the same way",
    "shared otherwise": "embed.token.weight (split along dimension 0) and head.weight (split along dimension 1) are "
    "the same parameter; split both in the same way",
    "kind": "0: is a Conv2d, expected Linear",
    "subclass": "0: is a NonDynamicallyQuantizableLinear, expected Linear",
    "two rows": "block1.mlp.up: rows 'block1.mlp.up' and 'block*.mlp.up' both match it; keep one row per module",
    "cut twice": "block1.attention.query.weight: split along dimension 0 by one row and 1 by another",
    "no heads": "block1.attention: Attention has no queries, keys; name attributes and submodules that it has",
    "no linear": "0: is a ReLU, expected Linear",
    "no row": "plan: 'head' has a str; expected a rule such as Column()",
    "grouped": ": 2 heads (pairs) cannot be split evenly over 3 ranks; use a multiple of 3, such as 3",
    "padding": "0: padding_idx is not supported with a split vocabulary",
}


@pytest.mark.ranks
def test_what_cannot_be_split_is_refused_with_numbers_and_nothing_is_sent(on_ranks):
    for found in on_ranks(3, refused):
        assert found == WANTED


def in_use(world: World) -> dict[str, str]:
    """Return the errors on two ranks for inputs that do not fit."""
    found = {}
    made = split(build(Case(sequence=1)), Case(sequence=1), world)
    ask = {
        "sequence": lambda: made.module(torch.zeros(2, 7, dtype=torch.int64)),
        "token": lambda: made.module(torch.tensor([[0, 24]])),
        "whole": lambda: SplitCrossEntropy(Region(world.group), 24)(torch.zeros(2, 24), torch.tensor([0, 24])),
        "target": lambda: made.module(torch.zeros(2, 8, dtype=torch.int64), torch.full((2, 8), 24)),
        "classes": lambda: SplitCrossEntropy(Region(world.group), 24)(torch.zeros(2, 8), torch.zeros(2, dtype=int)),
    }
    for name, call in ask.items():
        with pytest.raises(ValueError, match=r"\d") as error:
            call()
        found[name] = str(error.value)
    return found


@pytest.mark.ranks
def test_inputs_that_do_not_fit_are_refused_with_numbers(on_ranks):
    for found in on_ranks(2, in_use):
        assert found == {
            "sequence": "sequence parallel: dimension 1 of [2, 7, 16] is 7, which is not divisible by 2 ranks; pad "
            "it, or parallelize without sequence_parallel",
            "token": "token 24 is outside the vocabulary of 24; expected 0 to 23",
            "whole": "target 24 is outside the vocabulary of 24; expected 0 to 23",
            "target": "target 24 is outside the vocabulary of 24; expected 0 to 23",
            "classes": "cross-entropy over 24 classes on 2 ranks: logits have 8 classes; expected this rank's 12, "
            "or all",
        }


def beyond(world: World) -> list[str]:
    """Differentiate twice through every function that communicates; and split on a rank outside the group."""
    found = []

    def ask(output: torch.Tensor, *by: torch.Tensor) -> None:
        with pytest.raises(RuntimeError) as error:
            torch.autograd.grad(output.sum(), by, create_graph=True)
        found.append(str(error.value).partition(" through")[0])

    for case in (Case(), Case(sequence=1)):
        model = split(build(case), case, world).module
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        ask(model(tokens, tokens), model.head.weight)
        x = torch.ones(2, 8, 16, dtype=torch.float64, requires_grad=True)
        for part in (model.block1.mlp.up, model.block1.mlp.down, model.head.eval()):
            width = part.in_features
            ask(part(x[..., :width] if width <= 16 else x.repeat(1, 1, 2)[..., :width]), part.weight)
    logits = torch.ones(2, 12, requires_grad=True)
    ask(SplitCrossEntropy(Region(world.group), 24)(logits, torch.tensor([0, 23])), logits)
    outside = dist.new_group([0])
    if world.rank == 1:
        with pytest.raises(ValueError, match="rank 1 is not in the given process group"):
            parallelize(nn.Sequential(nn.Linear(2, 2)), {"0": Column()}, outside)
    return found


@pytest.mark.ranks
def test_gradients_of_gradients_are_refused_and_not_left_out(on_ranks):
    # These gradients used to be silently wrong: create_graph does not record the communication of a backward.
    for found in on_ranks(2, beyond):
        assert found == ["a backward with create_graph=True"] * 9


def test_a_stage_may_lack_what_rows_speak_of():
    stage = assemble_gpt(Case().shape)[1:2]
    parallelize(stage, GPT_PLAN, None, partial=True)
    with pytest.raises(ValueError, match=r"'embed.token' matches no module; the model has block1"):
        parallelize(assemble_gpt(Case().shape)[1:2], GPT_PLAN, None)


def test_only_a_gpt_has_a_plan():
    with pytest.raises(ValueError, match="it has no plan for other models"):
        split_gpt(build_vgg(VGG_SHAPES["vgg11"], 1), None)


def test_a_split_model_is_not_pickled_but_its_state_is():
    made = split_gpt(assemble_gpt(Case().shape), None)
    with pytest.raises(TypeError, match=r"holds a process group and cannot be pickled; save its state_dict\(\)"):
        pickle.dumps(made.module)
    assert pickle.dumps(made.module.state_dict())
