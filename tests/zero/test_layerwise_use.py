"""Layerwise beyond plain steps: refusals, micro-batches, states, 16 bits, operations in between."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from muster.jobs.world.world import World
from muster.zero.layerwise import Layerwise
from support.refusals import said_by
from support.tensors import apart

pytestmark = pytest.mark.ranks


def small(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)


def refusals(world: World) -> dict[str, str]:
    tied, beside = small(), small()
    tied.append(nn.Linear(5, 1))
    tied[3].weight = tied[2].weight
    beside.register_parameter("own", nn.Parameter(torch.zeros(2)))
    model, inputs = Layerwise(small(), world.group), torch.ones(2, 3, dtype=torch.float64)
    calls: dict[str, Callable[[], object]] = {
        "tied": lambda: Layerwise(tied, world.group),
        "beside": lambda: Layerwise(beside, world.group),
        "no sequence": lambda: Layerwise(nn.Linear(2, 2), world.group),
        "part": lambda: model.module[0](inputs),
        "whole": lambda: model.module(inputs),
        "state": lambda: model.module.state_dict(),
        "no forward": lambda: model.backward(torch.ones(())),
        "own backward": lambda: model(inputs).sum().backward(),
        "strange": lambda: model.optimizer(torch.optim.SGD, [nn.Parameter(torch.ones(1))], lr=0.1),
        "no graph": lambda: model.backward(_without_graph(model, inputs)),
    }
    found = {which: said_by(call, (TypeError, ValueError, RuntimeError)) for which, call in calls.items()}
    found["strange"] = found["strange"][
        -len("of a group does not belong to the wrapped module; pass only its parameters") :
    ]
    return found


def _without_graph(model: Layerwise, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return model(inputs).sum()


def test_what_cannot_be_is_refused_by_name(on_ranks):
    first, second = on_ranks(2, refusals)
    assert first == second
    assert first == {
        "tied": "3.weight is tied to 2.weight, which layer 2 frees; do not tie layers",
        "beside": "own belongs to no layer, so it would never be gathered; move it into a layer",
        "no sequence": "Layerwise runs the layers of an nn.Sequential one by one, got a Linear",
        "part": "0: used while its parameters are sharded; call the Layerwise wrapper, or use gather_full()",
        "whole": "0: used while its parameters are sharded; call the Layerwise wrapper, or use gather_full()",
        "state": "0: used while its parameters are sharded; call the Layerwise wrapper, or use gather_full()",
        "no forward": "backward() needs a forward with gradients before it; call the Layerwise once per backward",
        "own backward": "this graph ends after the last layer; call backward(loss) of the Layerwise instead",
        "strange": "of a group does not belong to the wrapped module; pass only its parameters",
        "no graph": "backward() needs a forward with gradients before it; call the Layerwise once per backward",
    }


def micro_batches_and_state(world: World) -> list[str]:
    """Clip two micro-batches per step; then load the state into another model, which continues like the first."""
    problems = []

    def train(model: Layerwise, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        optimizer.zero_grad()
        for micro in range(2):
            torch.manual_seed(100 * step + 10 * micro + world.rank)
            model.backward(model(torch.randn(4, 3, dtype=torch.float64)).square().mean() / 2)
        norm = optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        return norm

    model = Layerwise(small(), world.group)
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.1)
    reference = small()
    other = torch.optim.AdamW(reference.parameters(), lr=0.1)
    for step in range(2):
        norm = train(model, optimizer, step)
        other.zero_grad()
        for shard in range(world.size):
            for micro in range(2):
                torch.manual_seed(100 * step + 10 * micro + shard)
                inputs = torch.randn(4, 3, dtype=torch.float64)
                (reference(inputs).square().mean() / 2 / world.size).backward()
        wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        other.step()
        if not torch.allclose(norm, wanted, rtol=1e-11):
            problems.append(f"norm {norm}, wanted {wanted}")
    problems += apart(dict(model.state_dict()), dict(reference.state_dict()))
    again = Layerwise(small(), world.group)
    again_optimizer = again.optimizer(torch.optim.AdamW, lr=0.1)
    again.load_state_dict(model.state_dict())
    again_optimizer.load_state_dict(optimizer.full_state_dict())
    third = Layerwise(small(), world.group)
    for mine, theirs in zip(third.held_parameters(), model.held_parameters(), strict=True):
        mine.tensor.copy_(theirs.tensor)
    third.refresh()
    problems += [f"filled: {each}" for each in apart(dict(third.state_dict()), dict(reference.state_dict()))]
    train(model, optimizer, 9)
    train(again, again_optimizer, 9)
    problems += [f"again: {each}" for each in apart(dict(again.state_dict()), dict(model.state_dict()))]
    return problems


def low_precision(world: World) -> list[str]:
    """16-bit weights are stepped in float32: updates that would be lost in 16 bits add up."""
    model = Layerwise(small(torch.bfloat16), world.group)
    optimizer = model.optimizer(torch.optim.SGD, lr=1e-4)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    inputs = torch.full((2, 3), 1.0 + world.rank, dtype=torch.bfloat16)
    for _ in range(40):
        optimizer.zero_grad()
        model.backward(model(inputs).sum())
        optimizer.step()
    stepped = [each for each in optimizer.held_state() if each.key == "master"]
    after = model.state_dict()
    if not stepped or any(each.tensor.dtype != torch.float32 for each in stepped):
        return ["no float32 masters"]
    weight = {name: (after[name] - each).abs().max().item() for name, each in before.items()}
    return [] if weight["2.bias"] > 1e-3 else [f"the bias of the last layer has moved by {weight['2.bias']}"]


def test_micro_batches_add_up_and_the_state_goes_into_another(on_ranks):
    assert on_ranks(3, micro_batches_and_state) == [[]] * 3


def test_weights_of_16_bits_have_masters(on_ranks):
    assert on_ranks(2, low_precision) == [[]] * 2


def between(world: World) -> list[str]:
    """Operations between a forward and its backward: forwards without gradients, a failing one, a step."""
    problems = []
    model, plain = Layerwise(small(), world.group), small()
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    inputs, others = torch.ones(2, 3, dtype=torch.float64), torch.full((4, 3), 2.0, dtype=torch.float64)
    loss = model(inputs).square().mean()
    with torch.no_grad():
        problems += [] if torch.allclose(model(others), plain(others)) else ["evaluated to something else"]
    with torch.inference_mode():
        model(others)
    older = model(others)
    for unusable in (older, model(others).detach()):
        model(inputs)
        try:
            model.backward(unusable.sum())
            problems.append("took a loss of something else")
        except RuntimeError as error:
            problems += [] if "forward" in str(error) else [str(error)]
    try:
        model(torch.ones(2, 4, dtype=torch.float64))
        problems.append("took inputs of another width")
    except RuntimeError:
        problems += [
            f"{flat_parameter.names} are whole" for flat_parameter in model.flat_parameters if flat_parameter.is_whole
        ]
    del loss
    loss = model(inputs).square().mean()
    with torch.no_grad():
        model(others)
    model.backward(loss)
    plain(inputs).square().mean().backward()
    problems += apart(model.full_gradients(), {name: each.grad for name, each in plain.named_parameters()})
    loss = model(inputs).square().mean()
    optimizer.step()
    try:
        model.backward(loss)
        problems.append("took gradients of a graph from before the step")
    except RuntimeError as error:
        problems += [] if "inplace operation" in str(error) else [str(error)]
    return problems


def test_what_comes_between_a_forward_and_its_backward_does_not_harm_it(on_ranks):
    assert on_ranks(2, between) == [[]] * 2
