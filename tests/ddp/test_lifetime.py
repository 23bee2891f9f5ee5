"""What a wrapper holds on to, what can be copied of it, and what a gradient that has a graph of its own becomes."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest

from muster.jobs.world.world import World
from support.data_parallel import WRAPPERS, backwards, gradients_apart, gradients_of, one_process, wrap
from support.data_parallel_models import CASES

pytestmark = pytest.mark.ranks

TOY = CASES["toy"]


def copied(world: World) -> list[str]:
    problems = []
    for wrapper in WRAPPERS:
        model = wrap(world, wrapper, "toy")
        for copying in (copy.deepcopy, pickle.dumps):
            try:
                copying(model)
            except TypeError as error:
                problems += [] if "copy its .module" in str(error) else [f"{wrapper}: {error}"]
            else:
                problems.append(f"{wrapper}: {copying.__name__} made a copy that synchronizes nothing")
        copy.deepcopy(model.module)
        pickle.dumps(model.module.state_dict())
    return problems


def test_a_wrapper_is_not_copied_but_its_module_is(on_ranks):
    assert on_ranks(2, copied) == [[]] * 2


def with_a_graph(world: World) -> list[str]:
    problems = []
    for wrapper in WRAPPERS:
        model, serial = wrap(world, wrapper, "toy"), TOY.build(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the circle that create_graph makes
            TOY.loss(model, world.rank).backward(create_graph=True)
        model.finish_gradient_synchronization()
        found = {name: None if grad is None else grad.detach() for name, grad in gradients_of(model.module).items()}
        wanted = one_process(TOY, serial, range(world.size))
        problems += [f"{wrapper}: {each}" for each in gradients_apart(found, wanted, 0)]
    return problems


def test_a_backward_that_makes_a_graph_has_the_mean_too(on_ranks):
    assert on_ranks(2, with_a_graph) == [[]] * 2


def let_go(world: World) -> list[str]:
    problems = []
    gc.disable()  # nobody looks for circles
    for wrapper in ("FlatAllReduce", "OverlappedDDP", "BucketedDDP"):
        model = wrap(world, wrapper, "toy")
        backwards(world, model, TOY)
        flat = weakref.ref(model._reducer.buckets[0])
        del model
        problems += [f"{wrapper} keeps its buckets"] if flat() is not None else []
    return problems


def test_a_deleted_wrapper_lets_go_of_its_buckets_at_once(on_ranks):
    assert on_ranks(2, let_go) == [[]] * 2
