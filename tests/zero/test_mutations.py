"""Tests of the tests: the checks used by other tests must detect mistakes in a sharded wrapper."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.ddp.base import DataParallel
from muster.ddp.primitives import ring_all_gather
from muster.jobs.world.world import World
from muster.zero import data_parallel, scatter, whole
from muster.zero.flat import FlatParameters
from muster.zero.gather import LinkGather
from muster.zero.gradients import PassingGradients
from muster.zero.scatter import Scatter
from muster.zero.segments import Segment
from muster.zero.sharded import Sharded
from muster.zero.shared_memory import SharedMemoryPeers
from support.sharded import Run, not_sharded, over_links, wrong_training

pytestmark = pytest.mark.ranks


def together(*patches: Any) -> Any:
    stack = ExitStack()
    for each in patches:
        stack.enter_context(each)
    return stack


class WholeScatter(Scatter):
    """An all-reduce after which every rank keeps all of it."""

    def _send(self, bucket: Any) -> Callable[[], Tensor]:
        mean = bucket.pack(1.0) / self.ranks
        dist.all_reduce(mean, group=self.group)
        return lambda: mean


def nothing_sharded() -> Any:
    """Every rank has everything, and steps everything."""

    def unsharded(named: Any, **_: Any) -> FlatParameters:
        return FlatParameters(named, rank=0, ranks=1)

    def copied(gather: LinkGather, flat_parameter: FlatParameters, shard: Tensor, out: Tensor) -> Callable[[], None]:
        out.copy_(shard)
        return lambda: None

    return together(
        mock.patch.object(data_parallel, "FlatParameters", unsharded),
        mock.patch.object(data_parallel, "scatter_for", lambda group, *_, **__: WholeScatter(group)),
        mock.patch.object(LinkGather, "start", copied),
        over_links(),
    )


def gather_left_out() -> Any:
    return together(over_links(), mock.patch.object(LinkGather, "start", return_value=lambda: None))


def _own_alone(peers: SharedMemoryPeers, sizes: Any) -> list[list[Tensor]]:
    """Every rank sees its own memory instead of the others'."""
    ranks = dist.get_world_size(peers.group)
    return [[torch.zeros(elements, dtype=dtype)] * ranks for elements, dtype in sizes]


def whole_gradients_kept() -> Any:
    """A shard is a view of the whole, and so keeps it alive."""
    return mock.patch.object(PassingGradients, "deliver", lambda bucket, mean: bucket.flat_parameter.add_gradient(mean))


def state_of_another_shard() -> Any:
    """The optimizer steps the next rank's shard with this rank's gradients."""
    made = Segment.__init__

    def of_the_next(segment: Segment, flat_parameter: FlatParameters, slices: Any) -> None:
        made(segment, flat_parameter, slices)
        theirs = flat_parameter.parts(flat_parameter.full)[(flat_parameter.rank + 1) % flat_parameter.layout.ranks]
        segment.stepped = nn.Parameter(theirs[segment.begin : segment.end])

    return mock.patch.object(Segment, "__init__", of_the_next)


@contextmanager
def gathered_when_waited_for() -> Iterator[None]:
    """Gather only when somebody waits, so that missing waits are detected. Not a mistake by itself."""

    def start(gather: LinkGather, flat_parameter: FlatParameters, shard: Tensor, out: Tensor) -> Callable[[], None]:
        left = [lambda: ring_all_gather(shard, flat_parameter.parts(out), gather.group)]
        return lambda: left.pop()() if left else None

    with over_links(), mock.patch.object(LinkGather, "start", start):
        yield


def no_wait_before_the_forward() -> Any:
    return together(
        gathered_when_waited_for(),
        mock.patch.object(whole, "_needs", return_value=()),
        mock.patch.object(Sharded, "named_parameters", DataParallel.named_parameters),  # otherwise it would wait
        mock.patch.object(whole.Expect, "begin"),  # otherwise reading a parameter would wait
    )


MUTANTS: dict[str, Callable[[], Any]] = {
    "no mistake": nullcontext,
    "gathered when waited for": gathered_when_waited_for,
    "nothing sharded": nothing_sharded,
    "whole gradients kept": whole_gradients_kept,
    "any number of buckets under way": lambda: mock.patch.object(data_parallel, "UNDER_WAY", None),
    "no reduce": lambda: together(over_links(), mock.patch.object(scatter, "ring_reduce_scatter")),
    "neighbours who see themselves": lambda: mock.patch.object(SharedMemoryPeers, "share", _own_alone),
    "state of another rank's shard": state_of_another_shard,
    "gather left out": gather_left_out,
    "no wait before the forward": no_wait_before_the_forward,
}


def trains(world: World, stage: int) -> list[str]:
    return wrong_training(world, Run("toy", "adamw", stage))


# for each mutant: the check that must detect it, and the stages
MISTAKES: dict[str, tuple[Callable[[World, int], list[str]], tuple[int, ...]]] = {
    "nothing sharded": (not_sharded, (1, 2)),
    "whole gradients kept": (not_sharded, (2,)),
    "any number of buckets under way": (not_sharded, (2,)),
    "no reduce": (trains, (1, 2)),
    "neighbours who see themselves": (trains, (1, 2)),
    "state of another rank's shard": (trains, (1, 2)),
    "gather left out": (trains, (1, 2)),
    "no wait before the forward": (trains, (1, 2)),
}


def reported(world: World) -> dict[str, bool]:
    """Return for each mutant and stage whether its check finds something wrong; without a mutant, whether any does."""
    found = {}
    for mutant, make in MUTANTS.items():
        checks = MISTAKES.get(mutant, (lambda *given: [*trains(*given), *not_sharded(*given)], (1, 2)))
        for stage in checks[1]:
            with make():
                found[f"{mutant}, {stage}"] = bool(checks[0](world, stage))
    return found


def test_every_mistake_is_reported_on_some_rank_and_nothing_else_is(on_ranks):
    first, second = on_ranks(2, reported)
    found = {each: first[each] or second[each] for each in first}
    assert found == {each: each.split(",")[0] in MISTAKES for each in found}
    assert {each.split(",")[0] for each in found} == set(MUTANTS)


def nothing_sharded_trains(world: World) -> list[str]:
    with nothing_sharded():
        return trains(world, 1)


def test_what_is_not_sharded_trains_right_so_numbers_alone_would_not_tell(on_ranks):
    assert on_ranks(2, nothing_sharded_trains) == [[]] * 2
