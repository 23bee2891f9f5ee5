"""Stage 3 in use: access outside the allowed time is refused by name, and errors leave nothing behind."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from muster.jobs.world.world import World
from muster.pipe import Pipe
from muster.zero import ShardedDataParallel
from support.data_parallel import same_bits
from support.stage3 import Watch, backwards, inputs_of, loss_of, wrap
from support.zero_models import row_major, seeded
from support.zero_units import CASES, Net, blocks

pytestmark = pytest.mark.ranks


def raised(do: Callable[[], Any]) -> str:
    try:
        return f"gave {do()!r}"
    except (RuntimeError, ValueError, TypeError, ZeroDivisionError) as error:
        return str(error)


def reads(world: World) -> dict[str, str]:
    """Try everything that would read freed memory; the process must survive."""
    model = wrap(world, CASES["chain"])
    recurrent = wrap(world, CASES["recurrent"])
    net, x = model.module, inputs_of(0, 0)
    weight, larger = net.b0.up.weight, nn.Sequential(model)
    uses: dict[str, Callable[[], Any]] = {
        "sum": weight.sum, "data": lambda: weight.data, "tolist": weight.tolist, "print": lambda: print(weight),
        "plus": lambda: 1 - weight, "item": lambda: weight[0], "write": lambda: nn.init.zeros_(weight),
        "set": lambda: setattr(weight, "data", torch.zeros(9, 6)), "list": lambda: torch.stack([x, weight]),
        "copy": lambda: copy.deepcopy(net), "save": lambda: torch.save(net, io.BytesIO()),
        "pickle": lambda: pickle.dumps(weight), "state": net.state_dict,
        "load": lambda: larger.load_state_dict(dict.fromkeys(larger.state_dict(), torch.zeros(6))),
        "optimizer": lambda: torch.optim.SGD(model.parameters(), lr=1.0), "convert": net.double,
        "norm": lambda: torch._foreach_norm(list(net.parameters())), "part": lambda: net.b0.up(x),
        "recurrent part": lambda: recurrent.module.b0.lstm(x),
    }  # fmt: skip
    told = {name: raised(use) for name, use in uses.items()}
    return {name: text for name, text in told.items() if "is sharded and not gathered here" not in text}


def test_to_read_a_parameter_that_is_not_there_is_refused_by_its_name(on_ranks):
    assert on_ranks(1, reads) == [{}]


def calls(world: World) -> list[str]:
    """Use units and parameters in wrong places."""
    model = wrap(world, CASES["chain"])
    x = inputs_of(0, 0)
    stolen = Net(lambda net, y, *_: net.b1(net.b0(y)) @ net.b0.up.weight.t(), **blocks(2))
    nothing = Net(lambda net, y, *_: net.nothing(y) or y.sum(), nothing=Nothing())
    found = [
        raised(lambda: model.module.b1(x)),
        raised(lambda: ShardedDataParallel(stolen, world.group, stage=3)(x, 0, 0)),
        raised(lambda: ShardedDataParallel(nothing, world.group, stage=3)(x, 0, 0)),
        raised(lambda: loss_of(model, 0, 0).backward(create_graph=True)),
        raised(lambda: torch.autograd.grad(model(x, 0, 0).sum(), [], create_graph=True)),
    ]
    loss = loss_of(model, 0, 0)
    model.residency.spread(model.flat_parameters)  # like a step
    return [*found, raised(loss.backward)]


class Nothing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: Tensor) -> None:
        return None


@pytest.mark.filterwarnings("ignore:Using backward")
def test_what_is_used_outside_its_unit_is_refused_by_name(on_ranks):
    (found,) = on_ranks(1, calls)
    assert [text.partition(";")[0].partition(":")[0] for text in found[:4]] == ["b1", "b0.up.weight", "nothing", "b3"]
    assert "used outside the forward" in found[0]
    assert "returns a NoneType" in found[2]
    assert "create_graph" in found[3]
    assert "modified by an inplace operation" in found[5]


def right_step(world: World, model: ShardedDataParallel, what: str) -> list[str]:
    """A step after an error must equal that of a module without the error."""
    model.zero_grad()
    plain = row_major(seeded(CASES["chain"].build, 1))
    loss_of(plain, 7, world.rank).backward()
    backwards(world, model, 7, 1)
    found = model.full_gradients()
    problems = [
        f"after {what}: {sum(flat.full.untyped_storage().nbytes() for flat in model.flat_parameters)} bytes whole"
    ]
    problems = [] if problems[0].endswith(" 0 bytes whole") else problems
    if world.size == 1:
        problems += [
            f"after {what}: {name}" for name, each in plain.named_parameters() if not same_bits(found[name], each.grad)
        ]
    return problems


def fails(*_: Any) -> None:
    raise ZeroDivisionError("a mistake of the module's own")


def goes_on(world: World) -> list[str]:
    model = wrap(world, CASES["chain"], exact=True)
    watch, problems = Watch(model), right_step(world, model, "nothing")
    for what, make in {
        "a forward that raised": lambda: model.module.b2.up.register_forward_hook(fails),
        "a backward that raised": lambda: model.module.b1.up.register_forward_hook(
            lambda module, inputs, output: output.register_hook(fails) and None
        ),
    }.items():
        handle = make()
        problems += [] if raised(lambda: backwards(world, model, 0, 1)).startswith("a mistake") else [what]
        handle.remove()
        problems += right_step(world, model, what)
    for context in (torch.no_grad, torch.inference_mode, nullcontext):
        with context():
            model(inputs_of(0, 0), 0, 0)
        problems += right_step(world, model, f"a forward in {context.__name__}")
    older = loss_of(model, 7, world.rank)
    with torch.no_grad():
        model(inputs_of(0, 0), 0, 0)
    model.zero_grad()
    older.backward()
    once = {name: each.clone() for name, each in model.full_gradients().items()}
    problems += [] if raised(loss_of(model, 7, world.rank).backward).startswith("gave None") else ["the second"]
    twice = model.full_gradients()
    problems += [name for name in once if not torch.allclose(2 * once[name], twice[name])]
    loss = loss_of(model, 7, world.rank)
    model.zero_grad()
    loss.backward(retain_graph=True)
    loss.backward()
    problems += [name for name, each in model.full_gradients().items() if not torch.allclose(each, twice[name])]
    x = inputs_of(0, 0).requires_grad_()
    torch.autograd.grad(model(x, 0, 0).sum(), x)
    problems += right_step(world, model, "a gradient of the inputs alone")
    return problems + ([f"{watch.most} units"] if watch.most > 2 else [])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_after_what_went_wrong_is_right(on_ranks, ranks):
    assert on_ranks(ranks, goes_on) == [[]] * ranks


def whole(world: World) -> list[str]:
    """gather_full: write, nest, copy, step and train within it; then delete the wrapper."""
    model = wrap(world, CASES["chain"])
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    plain = row_major(seeded(CASES["chain"].build, 1))
    problems = []
    with model.gather_full() as module:
        taken = copy.deepcopy(module)
        pickle.dumps(taken.b0)
    for name, each in plain.named_parameters():
        problems += [] if same_bits(taken.get_parameter(name), each) else [f"{name} in a copy"]
    taken(inputs_of(0, 0), 0, 0)
    with model.gather_full(writes=True) as module, model.gather_full():
        module.b0.scale.data.fill_(3.0)
    with model.gather_full() as module:
        backwards(world, model, 0, 1)
        before = module.b0.scale.detach().clone()
        optimizer.step()
        stepped = before - 0.1 * model.full_gradients()["b0.scale"]
        problems += [] if before.eq(3.0).all() and same_bits(module.b0.scale, stepped) else ["not stepped within"]
    state = model.state_dict()
    problems += [] if same_bits(state["b0.scale"], stepped) else ["not stepped"]
    model.load_state_dict(plain.state_dict())
    problems += [name for name, each in model.state_dict().items() if not same_bits(each, plain.state_dict()[name])]
    net, residency = model.module, weakref.ref(model.residency)
    del model, optimizer, module
    gc.collect()
    problems += [] if residency() is None else ["something holds the unit states"]
    left = [name for name, part in net.named_modules() if part._forward_hooks or part._forward_pre_hooks]
    again = [raised(lambda: net(inputs_of(0, 0), 0, 0)), raised(lambda: ShardedDataParallel(net, world.group, stage=3))]
    return problems + left + [each for each in again if "call the wrapper's unwrap() before deleting it" not in each]


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_are_whole_within_gather_full_and_the_module_is_left_alone(on_ranks, ranks):
    assert on_ranks(ranks, whole) == [[]] * ranks


def autocast(world: World) -> list[str]:
    """Autocast caches 16-bit copies of weights until it ends; those of freed units must not be cached."""
    model, plain = wrap(world, CASES["chain"]), row_major(seeded(CASES["chain"].build, 1))
    for each in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(each, 0, 0)
        loss.backward()
    found = model.full_gradients()
    problems = [name for name, each in plain.named_parameters() if not same_bits(found[name], each.grad)]
    return problems + [str(casts_of_parameters(each)) for each in (model, plain)]


def casts_of_parameters(module: nn.Module) -> int:
    """Count them in the second of two forwards within one autocast."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        module(inputs_of(0, 0), 0, 0)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            module(inputs_of(0, 0), 0, 0)
    activations = 8
    return sum(event.name == "aten::_to_copy" for event in seen.events() or ()) - activations


def test_autocast_keeps_no_copies_of_units_that_are_freed(on_ranks):
    assert on_ranks(1, autocast) == [["16", "0"]]  # four blocks of two matrices and two biases


def threads(world: World) -> list[str]:
    """Stages of a `Pipe` run on their own threads."""
    said = []
    for units in (None, 1):
        pipe = Pipe(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)), 2, devices=["cpu"] * 2)
        model = ShardedDataParallel(pipe, world.group, stage=3, units=None if units is None else [pipe.module[1]])
        said.append(raised(lambda: model(torch.ones(4, 6))))  # noqa: B023
    return said


def test_units_that_run_on_other_threads_are_refused_by_name(on_ranks):
    # Their gathers used to have no order, and their graphs kept freed memory: gradients failed far from the cause.
    for first, second in on_ranks(1, threads):
        assert first.startswith("module.0: runs on another thread than the forward of its wrapper")
        assert "module." in second
