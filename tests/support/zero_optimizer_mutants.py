"""Sharded optimizers with one mistake each, for tests of the tests."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from muster.ddp.norms import plain_norm
from muster.zero import loading, optimizer, sources, states
from muster.zero.flat import FlatParameters
from muster.zero.gather import LinkGather
from muster.zero.sources import Alone


def nothing_sharded() -> AbstractContextManager[Any]:
    """Every rank keeps and steps everything."""

    class Whole(FlatParameters):
        def __init__(self, named: Any, **_: Any) -> None:
            super().__init__(named, rank=0, ranks=1)

        def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
            return [flat] * torch.distributed.get_world_size()

    return mock.patch.object(sources, "FlatParameters", Whole)


def no_gather() -> AbstractContextManager[Any]:
    """Each rank has stepped its shard, and nobody hears of it."""
    made = ExitStack()
    made.enter_context(mock.patch("muster.zero.gather.on_one_host", return_value=False))
    made.enter_context(mock.patch.object(LinkGather, "start", return_value=lambda: None))
    return made


def gradient_of_another_shard() -> AbstractContextManager[Any]:
    """The first elements' gradients are taken, whatever the shard is."""
    whole = Alone.gradient

    def first(source: Any, home: Any, slices: Any) -> Any:
        return whole(source, home, [replace(at, start=0, stop=at.elements) for at in slices])

    return mock.patch.object(Alone, "gradient", first)


def state_of_another_shard() -> AbstractContextManager[Any]:
    """The first elements' state is loaded, whatever the shard is."""
    cut = loading._cut

    def first(segment: Any, at: Any, *rest: Any) -> Any:
        return cut(segment, replace(at, start=0, stop=at.elements), *rest)

    return mock.patch.object(loading, "_cut", first)


def settings_kept() -> AbstractContextManager[Any]:
    """Hyper-parameters stay what they were when the optimizer was built."""
    return mock.patch.object(optimizer.ShardedOptimizer, "share_settings")


def zeros_for_none() -> AbstractContextManager[Any]:
    """A parameter without a gradient is stepped with zeros."""
    given = Alone.gradient

    def some(source: Any, home: Any, slices: Any) -> Any:
        gradient = given(source, home, slices)
        return home.of(home.shard, slices[0]).detach() * 0 if gradient is None else gradient

    return mock.patch.object(Alone, "gradient", some)


def own_norm() -> AbstractContextManager[Any]:
    """Gradients are clipped by the norm of this rank's shard."""
    return mock.patch.object(optimizer, "plain_norm", lambda shards, group, reduce: plain_norm(shards, reduce=False))


def shards_clipped() -> AbstractContextManager[Any]:
    """Only this rank's shard of whole gradients is clipped."""
    return mock.patch.object(Alone, "clipped_with", lambda source, shards: shards)


def masters_kept_to_themselves() -> AbstractContextManager[Any]:
    return mock.patch.object(FlatParameters, "write_back")


def writing_forgotten() -> AbstractContextManager[Any]:
    return mock.patch.object(FlatParameters, "follow_shard")


def others_state_forgotten() -> AbstractContextManager[Any]:
    """A whole state has zeros where it is another rank's."""

    def own_only(mine: Any, message: torch.Tensor, owner: int, recipient: int | None) -> bool:
        message *= owner == mine.rank
        return True

    return mock.patch.object(states, "_hand_over", own_only)


MUTANTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {  # and which check must report it
    "nothing sharded": (nothing_sharded, "events"),
    "no gather": (no_gather, "events"),
    "gradient of another shard": (gradient_of_another_shard, "events"),
    "state of another shard": (state_of_another_shard, "load"),
    "settings kept": (settings_kept, "events"),
    "zeros for none": (zeros_for_none, "events"),
    "own norm": (own_norm, "events"),
    "shards clipped": (shards_clipped, "events"),
    "masters kept to themselves": (masters_kept_to_themselves, "masters"),
    "writing forgotten": (writing_forgotten, "written"),
    "others' state forgotten": (others_state_forgotten, "events"),
}
