"""References held by a wrapper, copies of it, and gradients with a graph of their own."""

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator

import pytest

from muster.jobs.world.world import World
from support.data_parallel import WRAPPERS, backwards, gradients_apart, gradients_of, one_process, wrap
from support.data_parallel_models import CASES

pytestmark = pytest.mark.ranks

TOY = CASES["toy"]


def copied(world: World, wrapper: str) -> Iterator[str]:
    model = wrap(world, wrapper, "toy")
    for copying in (copy.deepcopy, pickle.dumps):
        try:
            copying(model)
        except TypeError as error:
            yield from [] if "copy its .module" in str(error) else [f"{error}"]
        else:
            yield f"{copying.__name__} made a copy that synchronizes nothing"
    copy.deepcopy(model.module)
    pickle.dumps(model.module.state_dict())


def with_a_graph(world: World, wrapper: str) -> Iterator[str]:
    model, serial = wrap(world, wrapper, "toy"), TOY.build(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the reference cycle from create_graph
        TOY.loss(model, world.rank).backward(create_graph=True)
    model.finish_gradient_synchronization()
    found = {name: None if grad is None else grad.detach() for name, grad in gradients_of(model.module).items()}
    wanted = one_process(TOY, serial, range(world.size))
    yield from gradients_apart(found, wanted, 0)


def let_go(world: World, wrapper: str) -> Iterator[str]:
    gc.disable()  # so that reference cycles would keep memory
    if wrapper not in ("FlatAllReduce", "OverlappedDDP", "BucketedDDP"):
        return
    model = wrap(world, wrapper, "toy")
    backwards(world, model, TOY)
    flat = weakref.ref(model._reducer.buckets[0])
    del model
    yield from ["keeps its buckets"] if flat() is not None else []


CHECKS: dict[str, Callable[[World, str], Iterable[str]]] = {
    "a wrapper is not copied, but its module is": copied,
    "a backward that makes a graph has the mean too": with_a_graph,
    "a deleted wrapper lets go of its buckets at once": let_go,
}


def checked(world: World, what: str) -> list[str]:
    return [f"{wrapper}: {each}" for wrapper in WRAPPERS for each in CHECKS[what](world, wrapper)]


@pytest.mark.parametrize("what", CHECKS)
def test_of_every_wrapper(on_ranks, what):
    assert on_ranks(2, checked, what=what) == [[]] * 2
