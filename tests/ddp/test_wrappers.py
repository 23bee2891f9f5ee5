"""The interface of a wrapper: the module's own names, micro-batches, virtual shards, groups, and statistics."""

import copy
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from muster import ddp
from muster.jobs.world.world import World
from support.data_parallel import (
    WRAPPERS,
    backwards,
    gradients_apart,
    gradients_of,
    numbers_added,
    one_process,
    same_bits,
    states_apart,
    wrap,
    wrong_gradients,
)
from support.data_parallel_models import CASES

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

EVERY_WRAPPER = pytest.mark.parametrize("wrapper", WRAPPERS)
SYNCHRONIZES_ITSELF = ["BucketedDDP", "OverlappedDDP"]


def names_of(world: World, wrapper: str) -> Iterator[str]:
    module = CASES["odd"].build(1)
    wanted = [list(module.state_dict()), [n for n, _ in module.named_parameters()], ["scale"]]
    model = getattr(ddp, wrapper)(module, world.group)
    found = [
        list(model.state_dict()),
        [n for n, _ in model.named_parameters()],
        [n for n, _ in model.named_buffers()],
    ]
    yield from [] if found == wanted and model.module is module else [f"has {found}"]
    other = CASES["odd"].build(2)
    model.load_state_dict(other.state_dict())
    yield from states_apart(module.state_dict(), other.state_dict())
    larger, again = nn.Sequential(nn.Linear(2, 2), model), CASES["odd"].build(3)
    saved = larger.state_dict()
    yield from [] if list(saved)[2:] == [f"1.{name}" for name in wanted[0]] else [f"saves {list(saved)}"]
    again_larger = nn.Sequential(nn.Linear(2, 2), getattr(ddp, wrapper)(again, world.group))
    again_larger.load_state_dict(saved)
    yield from states_apart(again.state_dict(), other.state_dict())
    pickle.loads(pickle.dumps(module))  # the wrapper leaves no references in the module
    yield from states_apart(copy.deepcopy(module).state_dict(), other.state_dict())


def test_the_package_lists_its_wrappers_without_importing_torch():
    code = "import ddp, sys; print(sorted(ddp.__all__), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{sorted(ddp.__all__)} False"


def accumulation(world: World, set_to_none: bool) -> list[str]:
    """Accumulate three micro-batches, twice: only the last one communicates, and all three count."""
    problems = []
    for wrapper in WRAPPERS:
        case, serial = CASES["odd"], CASES["odd"].build(1)
        model = wrap(world, wrapper, "odd")
        for _ in range(2):
            backwards(world, model, case, shards=3)
            wanted = one_process(case, serial, range(3 * world.size))
            # `.grad` is summed over micro-batches, and averaged over ranks only.
            whole = {name: None if mean is None else mean * 3 for name, mean in wanted.means.items()}
            largest = {name: value * 3 for name, value in wanted.largest.items()}
            found = gradients_of(model.module)
            numbers = world.size * 3 + 2  # undoes the division by the number of ranks
            problems += [f"{wrapper}: {each}" for each in gradients_apart(found, type(wanted)(whole, largest), numbers)]
            model.zero_grad(set_to_none=set_to_none)
    return problems


@pytest.mark.parametrize("set_to_none", [False, True])
def test_micro_batches_add_up_and_the_last_one_averages_them(on_ranks, set_to_none):
    assert on_ranks(2, accumulation, set_to_none=set_to_none) == [[]] * 2


def local_gradients(world: World, wrapper: str) -> Iterator[str]:
    model, alone = wrap(world, wrapper, "toy"), CASES["toy"].build(1)
    with model.no_sync():
        CASES["toy"].loss(model, world.rank).backward()
        model.finish_gradient_synchronization()
    CASES["toy"].loss(alone, world.rank).backward()
    apart = [n for n, each in gradients_of(alone).items() if not same_bits(gradients_of(model.module)[n], each)]
    yield from [f"{apart}"] if apart else []


def asked_twice(world: World, wrapper: str) -> Iterator[str]:
    model = wrap(world, wrapper, "toy")
    CASES["toy"].loss(model, world.rank).backward()
    if wrapper not in SYNCHRONIZES_ITSELF:
        model.finish_gradient_synchronization()
    before = {name: each.clone() for name, each in gradients_of(model.module).items()}
    if wrapper in SYNCHRONIZES_ITSELF or wrapper == "FlatAllReduce":
        model.finish_gradient_synchronization()  # does nothing: the backward has finished it
    after = gradients_of(model.module)
    yield from (f"{name}" for name in before if not same_bits(before[name], after[name]))
    wanted = one_process(CASES["toy"], CASES["toy"].build(1), range(world.size))
    yield from gradients_apart(after, wanted, numbers_added(world, model, 1))


def reaches_nothing(world: World, wrapper: str) -> Iterator[str]:
    """Rank 1's loss depends on no parameter: its backward calls no hook, so it must call finish explicitly."""
    case = CASES["toy"]
    model, serial = wrap(world, wrapper, "toy"), case.build(1)
    loss = case.loss(model, 0)
    (loss if world.rank == 0 else torch.zeros((), requires_grad=True) * 1).backward()
    model.finish_gradient_synchronization()
    alone = one_process(case, serial, [0])
    wanted = type(alone)({name: mean / 2 for name, mean in alone.means.items()})
    yield from gradients_apart(gradients_of(model.module), wanted, 0)


def forgotten(world: World) -> list[str]:
    """Delete each wrapper in turn: nothing of it may remain on the parameters, which stay alive."""
    problems = []
    module = CASES["toy"].build(1)
    for wrapper in WRAPPERS:
        model = getattr(ddp, wrapper)(module, world.group)
        backwards(world, model, CASES["toy"])
        gone = weakref.ref(model)
        del model
        left = [n for n, each in module.named_parameters() if each._post_accumulate_grad_hooks]
        problems += [f"{wrapper}: hooks on {left}"] if left else []
        problems += [f"{wrapper}: not gone"] if gone() is not None else []
    return problems


def test_a_wrapper_that_is_deleted_leaves_nothing_on_the_module(on_ranks):
    assert on_ranks(2, forgotten) == [[]] * 2


def synchronized_first(world: World, wrapper: str) -> Iterator[str]:
    """The first micro-batch is outside of `no_sync`; wrappers without hooks are finished at the end."""
    case = CASES["toy"]
    if wrapper not in ("AllReduce", "FlatAllReduce", "GatherScatter"):
        return
    model, serial = wrap(world, wrapper, "toy"), case.build(1)
    case.loss(model, world.rank).backward()
    with model.no_sync():
        case.loss(model, world.rank + world.size).backward()
    model.finish_gradient_synchronization()
    wanted = one_process(case, serial, range(2 * world.size))
    doubled = type(wanted)({name: mean * 2 for name, mean in wanted.means.items()}, wanted.largest)
    yield from gradients_apart(gradients_of(model.module), doubled, 4 * world.size)


def unused_everywhere(world: World) -> list[str]:
    return [
        f"{wrapper}: {each}"
        for wrapper in WRAPPERS
        for exact in (False, True)
        for each in wrong_gradients(world, wrapper, "never used", exact=exact, find_unused_parameters=True)
    ]


def test_what_no_rank_uses_keeps_no_gradient(on_ranks):
    assert on_ranks(2, unused_everywhere) == [[]] * 2


def other_parameters(world: World, wrapper: str) -> Iterator[str]:
    """Freeze, unfreeze, replace: each time gradients are the mean over the parameters trainable then."""
    case = CASES["toy"]
    model, serial = wrap(world, wrapper, "toy"), case.build(1)
    changes = {
        "as built": lambda toy: None,
        "frozen": lambda toy: toy.fc1.requires_grad_(False),
        "thawed": lambda toy: toy.fc1.requires_grad_(True),
        "replaced": lambda toy: setattr(toy.norm, "weight", nn.Parameter(torch.full((20,), 2.0))),
        "added": lambda toy: setattr(toy.fc2, "bias", nn.Parameter(torch.ones(5))),
    }
    for word, change in changes.items():
        for module in (model.module, serial):
            change(module)
            module.zero_grad()
        backwards(world, model, case)
        wanted = one_process(case, serial, range(world.size))
        found = gradients_of(model.module)
        yield from (f"{word}: {each}" for each in gradients_apart(found, wanted, 0))


def in_bfloat16(world: World) -> list[str]:
    problems = []
    for wrapper in WRAPPERS:
        for case in ("toy", "odd", "double"):
            found = wrong_gradients(world, wrapper, case, communication_dtype="bfloat16")
            problems += [f"{wrapper}, {case}: {each}" for each in found]
        model = wrap(world, wrapper, "toy", communication_dtype="bfloat16")
        backwards(world, model, CASES["toy"])
        elements = sum(each.numel() for each in model.parameters())
        problems += [] if model.stats().bytes == 2 * elements else [f"{wrapper}: sent {model.stats().bytes} bytes"]
        problems += [f"{name} has no float32" for name, g in gradients_of(model).items() if g.dtype != torch.float32]
    return problems


def test_gradients_can_be_sent_in_half_of_the_bytes(on_ranks):
    assert on_ranks(3, in_bfloat16) == [[]] * 3


def in_float16(world: World, wrapper: str) -> Iterator[str]:
    """Gradients whose mean fits into 16 bits, but not their sum; and buffers of types that gloo does not support."""
    if wrapper not in ("AllReduce", "FlatAllReduce", "OverlappedDDP", "BucketedDDP"):
        return
    module = torch.nn.Linear(1, 1, bias=False).half()
    kinds = {"int16": torch.int16, "fp8": torch.float8_e4m3fn, "bool": torch.bool, "complex": torch.complex64}
    for name, kind in kinds.items():
        module.register_buffer(name, torch.full((3,), 1.0 - world.rank).to(kind))
    module.register_buffer("number", torch.tensor(7 + world.rank, dtype=torch.uint16))
    model = getattr(ddp, wrapper)(module, world.group)
    (model(torch.full((1, 1), 200.0).half()) * 200).sum().backward()
    model.finish_gradient_synchronization()
    if module.weight.grad.item() != 40_000:
        yield f"the mean of 40000 on every rank is {module.weight.grad.item()}"
    held = {name: each.tolist() for name, each in module.named_buffers() if name != "fp8"}
    if held != {"int16": [1] * 3, "bool": [True] * 3, "complex": [1] * 3, "number": 7}:
        yield f"buffers are not rank 0's: {held}"
    if module.fp8.float().tolist() != [1.0] * 3:
        yield "the buffer in 8 bits is not rank 0's"


def told(world: World) -> dict:
    said = {}
    for wrapper in WRAPPERS:
        model = wrap(world, wrapper, "chain", **({"bucket_size_mb": 1 / 32} if wrapper == "BucketedDDP" else {}))
        before = model.stats()
        backwards(world, model, CASES["chain"])
        after = model.stats()
        said[wrapper] = [before.collectives, before.bytes, after.collectives, after.bytes, after.exposed_wait_s > 0]
    return said


def test_stats_tell_collectives_bytes_and_wait_of_the_last_synchronization(on_ranks):
    sent = 4 * 64 * 64 * 4
    counts = {"AllReduce": 4, "FlatAllReduce": 1, "GatherScatter": 8, "OverlappedDDP": 4, "BucketedDDP": 2}
    wanted = {wrapper: [0, 0, count, sent, True] for wrapper, count in counts.items()}
    assert on_ranks(2, told) == [wanted] * 2


def within_a_group(world: World) -> list[str]:
    """Ranks 1 and 2 form a group, in which rank 1 is the first, and rank 0 is alone: each group has its own means."""
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    group = groups[min(world.rank, 1)]
    place = World(dist.get_rank(group), dist.get_world_size(group), group, world.device)
    found = [
        f"{wrapper}: {each}"
        for wrapper in WRAPPERS
        for exact in (False, True)
        for each in wrong_gradients(place, wrapper, "odd", exact=exact)
    ]
    dist.barrier()
    return found


def test_a_wrapper_averages_over_the_ranks_of_its_group_alone(on_ranks):
    assert on_ranks(3, within_a_group) == [[]] * 3


CHECKS: dict[str, Callable[[World, str], Iterable[str]]] = {
    "parameters, buffers and state have the names of the module": names_of,
    "within no_sync gradients are this rank's own": local_gradients,
    "to ask for what the backward has finished changes nothing": asked_twice,
    "a rank whose backward reaches no parameter takes part when asked": reaches_nothing,
    "micro-batches within no_sync may come last where the end is asked for": synchronized_first,
    "parameters may be frozen, thawed, replaced and added between steps": other_parameters,
    "a sum that 16 bits cannot hold is divided before, and buffers are of any type": in_float16,
}


def checked(world: World, what: str) -> list[str]:
    return [f"{wrapper}: {each}" for wrapper in WRAPPERS for each in CHECKS[what](world, wrapper)]


@pytest.mark.parametrize("what", CHECKS)
def test_of_every_wrapper(on_ranks, what):
    assert on_ranks(2, checked, what=what) == [[]] * 2
