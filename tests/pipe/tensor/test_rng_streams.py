"""Dropout: ranks draw separate masks for split tensors, and equal ones for whole tensors; no draw is lost."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from muster.jobs.world.world import World
from muster.pipe.tensor.region import Region
from muster.pipe.tensor.rng_streams import OwnStream
from support.tensor_parallel import BATCH, Case, batch, build, far, split, wrong_copies, wrong_training

pytestmark = pytest.mark.ranks


def one_module(world: World) -> dict:
    """Draw in a module with its own stream, and before and after; again; in evaluation; and if it raises."""
    dropout = nn.Dropout(0.5)
    OwnStream(dropout, Region(world.group))
    torch.manual_seed(3)
    before = torch.rand(()).item()
    first = dropout(torch.ones(64)).tolist()
    after = torch.rand(()).item()
    second = dropout(torch.ones(64)).tolist()
    torch.manual_seed(3)
    torch.rand(())
    again = dropout(torch.ones(64)).tolist()
    dropout.eval()
    torch.manual_seed(4)
    kept = dropout(torch.ones(64)).tolist()
    in_evaluation = torch.rand(()).item()
    dropout.train()
    torch.manual_seed(5)
    with pytest.raises(TypeError):
        dropout(None)
    return {
        "own": [first, second],
        "again": again == first,
        "kept": kept == [1.0] * 64,
        "common": [before, after, in_evaluation, torch.rand(()).item()],
    }


def test_a_module_draws_numbers_of_the_ranks_own_and_the_common_stream_goes_on(on_ranks):
    found = on_ranks(3, one_module)
    own = [str(mask) for each in found for mask in each["own"]]
    assert len(set(own)) == len(own)
    assert all(each["again"] and each["kept"] for each in found)
    assert found[0]["common"] == found[1]["common"] == found[2]["common"]
    torch.manual_seed(4)
    assert found[0]["common"][2] == torch.rand(()).item()


def as_one_process(world: World) -> list[str]:
    """Residual and embedding dropout on whole activations equals one process; attention has no dropout here."""
    return wrong_training(world, Case(dropout=0.3, attention_dropout=False))


def test_dropout_of_what_is_whole_is_one_process_own(on_ranks):
    assert on_ranks(2, as_one_process) == [[]] * 2


def zeros(world: World, sequence: int | None) -> dict:
    """Return where each kind of dropout put zeros, and what is wrong after a step, with or without recomputation."""
    case = Case(dropout=0.4, sequence=sequence)
    made = split(build(case), case, world)
    found: dict[str, str] = {}
    for name in ("embed.dropout", "block1.dropout"):
        made.module.get_submodule(name).register_forward_hook(
            lambda _module, _args, output, name=name: found.update({name: str(output.eq(0.0).tolist())})
        )
    made.module.block1.attention.output.register_forward_pre_hook(
        lambda _module, args: found.update(attention=str(torch.default_generator.initial_seed()))
    )
    torch.manual_seed(7)
    made.module(*batch(0, world.device)).backward()
    again = copy.deepcopy(made.module)
    again.zero_grad()
    again.run_body = lambda layers, x: checkpointed(layers, x)
    torch.manual_seed(7)
    tokens, targets = batch(0, world.device)
    again(tokens, targets).backward()
    problems = wrong_copies(world, made)
    for (name, one), other in zip(made.module.named_parameters(), again.named_parameters(), strict=True):
        problems += far(other[1].grad, one.grad, f"{name}: recomputed gradient", 1e-14)
    assert tokens.shape[0] == BATCH
    return {"zeros": found, "problems": problems}


def checkpointed(layers: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def test_masks_differ_where_ranks_have_parts(on_ranks):
    for sequence, differ in ((None, {"attention"}), (0, {"attention", "block1.dropout"})):
        first, second = on_ranks(2, zeros, sequence=sequence)
        assert first["problems"] == second["problems"] == []
        masks = zip(first["zeros"].items(), second["zeros"].values(), strict=True)
        assert {name for (name, one), other in masks if one != other} >= differ
        assert first["zeros"].keys() == {"embed.dropout", "block1.dropout", "attention"}
        if sequence is None:
            assert first["zeros"]["embed.dropout"] == second["zeros"]["embed.dropout"]
