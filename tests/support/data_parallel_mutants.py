"""Wrappers with one mistake each, for tests of the tests: what a check does not report of these, it does not check."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from muster import ddp
from muster.ddp import base, bucketed, means


@contextmanager
def no_broadcast() -> Iterator[None]:
    """Ranks start with what each has built."""
    with mock.patch.object(base, "broadcast"):
        yield


@contextmanager
def buffers_forgotten() -> Iterator[None]:
    """Only what learns is broadcast."""
    whole = base.broadcast

    def some(tensors: list[Any], group: Any) -> None:
        whole([each for each in tensors if each.requires_grad], group)

    with mock.patch.object(base, "broadcast", some):
        yield


@contextmanager
def sum_for_mean() -> Iterator[None]:
    """Gradients are added, not averaged."""

    def undivided(mean: Any, group: Any) -> None:
        means.Mean.__init__(mean, group)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(means.AllReduceMean, "__init__", undivided))
        for wrapper in (ddp.AllReduce, ddp.GatherScatter):
            patches.enter_context(mock.patch.object(wrapper, "_mean", summed(wrapper._mean)))
        yield


def summed(mean: Callable[[Any, list[Any]], Any]) -> Callable[[Any, list[Any]], Any]:
    return lambda wrapper, gradients: mean(wrapper, gradients) * (wrapper.ranks * len(gradients))


@contextmanager
def no_overlap() -> Iterator[None]:
    """All collectives start when the backward is over."""
    with mock.patch.object(bucketed._Buckets, "hooks", False):
        yield


@contextmanager
def hook_dropped(place: int) -> Iterator[None]:
    """One parameter's hook is taken away after the wrapper has been built."""
    build = bucketed._Buckets._build

    def without_one(self: Any) -> Any:
        reducer = build(self)
        if reducer is not None:
            reducer._handles[place].remove()
        return reducer

    with mock.patch.object(bucketed._Buckets, "_build", without_one):
        yield


@contextmanager
def too_many_buckets() -> Iterator[None]:
    """Every parameter is a bucket of its own, whatever was asked for."""
    deal = bucketed.deal
    with mock.patch.object(bucketed, "deal", lambda named, _: deal(named, 0.0)):
        yield


MUTANTS: dict[str, Callable[[], Any]] = {
    "no broadcast": no_broadcast,
    "buffers forgotten": buffers_forgotten,
    "sum for mean": sum_for_mean,
    "no overlap": no_overlap,
    "first hook dropped": lambda: hook_dropped(0),
    "last hook dropped": lambda: hook_dropped(-1),
    "too many buckets": too_many_buckets,
}
