"""A state as named parts: dealt out evenly, each byte once, and read by an optimizer that has not stepped yet."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from muster.jobs.basics.errors import RefusedError
from muster.jobs.spec.train_fields import ModelSettings, OptimizerSettings
from muster.jobs.tensors.parts import TensorPart, deal, flat_part, whole_part
from muster.jobs.train.models import build_model
from muster.jobs.train.numerics.optim import build_optimizer
from muster.jobs.train.parallel.forms import Forms, buffer_parts
from muster.jobs.train.parallel.state import optimizer_parts, parameter_parts
from support.held import held_state

SIZES = st.lists(st.integers(0, 50), max_size=8)


def tensors(sizes: list[int], dtype: torch.dtype, first: str) -> list[TensorPart]:
    return [whole_part(f"model/{first}{i}", torch.arange(size).to(dtype)) for i, size in enumerate(sizes)]


@settings(deadline=None)
@given(own=SIZES, narrow=SIZES, wide=SIZES, ranks=st.integers(1, 9))
def test_every_element_is_dealt_once_and_the_shares_are_even(own, narrow, wide, ranks):
    of_own = tensors(own, torch.int64, "own")
    shared = [*tensors(narrow, torch.float16, "narrow"), *tensors(wide, torch.float64, "wide")]
    dealt = [deal(of_own, shared, rank=rank, ranks=ranks) for rank in range(ranks)]
    for part in [*of_own, *shared]:
        found = [each for parts in dealt for each in parts if each.piece.name == part.piece.name]
        assert torch.equal(torch.cat([each.tensor.reshape(-1) for each in found]), part.tensor)
        assert all(each.piece.extent == tuple(each.tensor.shape) for each in found)
    if ranks > 1:
        sizes = [sum(each.piece.nbytes for each in parts) for parts in dealt]
        assert max(sizes[1:]) - min(sizes[1:]) <= 16  # cuts fall between elements of up to 8 bytes
        assert sizes[0] <= max(sizes[1:]) + 16 or sizes[0] == sum(part.piece.nbytes for part in of_own)
        assert {each.piece.name for parts in dealt[1:] for each in parts} <= {part.piece.name for part in shared}


def test_a_flat_part_of_a_tensor_that_is_not_row_major_has_its_logical_elements():
    part = whole_part("model/w", torch.arange(6).reshape(2, 3).t())  # (3, 2): 0 3 1 4 2 5
    assert flat_part(part, 1, 4).tensor.tolist() == [3, 1, 4]
    assert flat_part(part, 0, 6) is part


def small(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(dtype)
    model[2].bias.requires_grad_(False)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(16, 4, generator=generator).to(next(model.parameters()).dtype)
    optimizer.zero_grad()
    functional.mse_loss(model(inputs), torch.ones(16, 2, dtype=inputs.dtype)).backward()
    optimizer.step()


def all_parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[TensorPart]:
    return [*buffer_parts(model), *parameter_parts(model), *optimizer_parts(model, optimizer)]


SGD = OptimizerSettings(name="sgd", lr=0.1, momentum=0.9, nesterov=True)
ADAMW = OptimizerSettings(name="adamw", lr=0.1, weight_decay=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [SGD, OptimizerSettings(lr=0.1), ADAMW], ids=["momentum", "plain", "adamw"])
def test_an_optimizer_that_has_not_stepped_goes_on_bit_by_bit_from_parts(options, dtype):
    model = small(dtype)
    optimizer = build_optimizer(model.parameters(), options)
    for number in range(3):
        step(model, optimizer, number)
    saved = {part.piece.name: (part.piece, part.tensor.clone()) for part in all_parts(model, optimizer)}

    fresh = small(dtype)
    resumed = build_optimizer(fresh.parameters(), options)
    for part in held_state(fresh, resumed).wanted({name: piece for name, (piece, _) in saved.items()}):
        part.tensor.copy_(saved[part.piece.name][1])
    for number in range(3, 6):
        step(model, optimizer, number)
        step(fresh, resumed, number)
    theirs = all_parts(model, optimizer)
    mine = all_parts(fresh, resumed)
    assert [part.piece for part in mine] == [part.piece for part in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one.tensor, other.tensor), one.piece.name


def test_names_are_those_of_the_model_and_frozen_parameters_have_no_optimizer_state():
    model = small()
    optimizer = build_optimizer(model.parameters(), SGD)
    before = [part.piece for part in optimizer_parts(model, optimizer)]
    step(model, optimizer, 0)
    assert [part.piece for part in optimizer_parts(model, optimizer)] == before, "made with the optimizer"
    names = [part.piece.name for part in all_parts(model, optimizer)]
    assert {"model/1.running_mean", "model/1.num_batches_tracked", "model/2.bias"} <= set(names)
    assert "optimizer/0.weight/momentum_buffer" in names
    assert not any(name.startswith("optimizer/2.bias") for name in names)
    assert len(names) == len(set(names))


def test_a_tied_weight_is_saved_once_and_its_other_name_is_told():
    model = build_model(ModelSettings(name="gpt-nano"), vocabulary=16, seed=0)
    names = {part.piece.name.removeprefix("model/") for part in [*parameter_parts(model), *buffer_parts(model)]}
    assert Forms(model).aliases == {"head.weight": "embed.token.weight"}
    assert names | set(Forms(model).aliases) == set(model.state_dict())


def test_another_model_is_refused_by_name():
    model, optimizer = small(), None
    optimizer = build_optimizer(model.parameters(), SGD)
    step(model, optimizer, 0)
    stored = {part.piece.name: part.piece for part in all_parts(model, optimizer)}
    smaller = {name: piece for name, piece in stored.items() if name != "model/0.bias"}
    with pytest.raises(RefusedError, match=r"of another model: 0\.bias is not in the checkpoint"):
        held_state(copy.deepcopy(model), optimizer).wanted(smaller)
    other = dict(stored)
    other["model/0.bias"] = whole_part("model/0.bias", torch.zeros(8, dtype=torch.float64)).piece
    with pytest.raises(RefusedError, match=r"model/0\.bias is F64 \[8\] there, but F32 \[8\] in this job"):
        held_state(model, optimizer).wanted(other)
    frozen = {**stored, "optimizer/2.bias/momentum_buffer": stored["model/2.bias"]}
    with pytest.raises(RefusedError, match=r"it has momentum_buffer of 2\.bias"):
        held_state(model, optimizer).wanted(frozen)


def test_a_share_is_dealt_anew_when_the_optimizer_has_made_state_and_follows_the_tensors():
    model = small()
    lazy = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # ours make theirs at once
    dealt = held_state(model, lazy)
    before = dealt.parts()
    step(model, lazy, 0)
    after = dealt.parts()
    assert len(after) > len(before)
    assert dealt.parts() is after
    step(model, lazy, 1)
    for mine, theirs in zip(dealt.parts(), all_parts(model, lazy), strict=True):
        assert torch.equal(mine.tensor, theirs.tensor)


def test_state_that_is_there_is_filled_where_it_is_and_what_is_not_is_made():
    model = small()
    optimizer = build_optimizer(model.parameters(), SGD)
    step(model, optimizer, 0)
    stored = {part.piece.name: part.piece for part in all_parts(model, optimizer)}
    addresses = {id(value) for state in optimizer.state.values() for value in state.values()}
    held_state(model, optimizer).wanted(stored)
    assert {id(value) for state in optimizer.state.values() for value in state.values()} == addresses
    lazy = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1, momentum=0.9)
    names = {part.piece.name for part in held_state(model, lazy).wanted(stored)}
    assert names == set(stored)
    assert {part.piece.name for part in all_parts(model, lazy)} == set(stored)


def test_further_tensors_are_rank_0_s_to_save_and_every_rank_s_to_read():
    model = small()
    optimizer = build_optimizer(model.parameters(), SGD)
    more = {"scaling/scale": torch.tensor(4.0)}
    shares = [held_state(model, optimizer, rank=rank, ranks=2, more=more).parts() for rank in range(2)]
    holders = [rank for rank, parts in enumerate(shares) for part in parts if part.piece.name == "scaling/scale"]
    assert holders == [0]
    stored = {part.piece.name: part.piece for part in all_parts(model, optimizer)}
    stored["scaling/scale"] = whole_part("scaling/scale", more["scaling/scale"]).piece
    read = {part.piece.name: part.tensor for part in held_state(model, optimizer, more=more).wanted(stored)}
    assert read["scaling/scale"].data_ptr() == more["scaling/scale"].data_ptr()


def test_a_weight_that_is_not_row_major_is_followed_too():
    model = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    optimizer = build_optimizer(model.parameters(), OptimizerSettings(lr=0.1))
    dealt = [held_state(model, optimizer, rank=rank, ranks=2) for rank in range(2)]
    for each in dealt:
        each.parts()
    with torch.no_grad():
        model.weight.fill_(7.0)
    ranges = [part.tensor for each in dealt for part in each.parts() if part.piece.name == "model/weight"]
    assert torch.cat(ranges).tolist() == [7.0] * 24
