"""Pairs of nodes on real ranks: which meet, what is recorded, and what happens when one does not come."""

from dataclasses import dataclass

import pytest
import torch.distributed as dist

from muster.collectives_bench.ranks.pairs import PairTests
from muster.collectives_bench.ranks.sampling import ControlGroup
from muster.collectives_bench.records import HostFacts, Pair
from muster.collectives_bench.records import WorldRecord as BenchWorld
from muster.collectives_bench.settings import BenchSettings
from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.world.world import World

pytestmark = pytest.mark.ranks

FEW = {"pair_bytes": 2**16, "block_s": 0.01}


@dataclass(frozen=True)
class BenchRanks:
    """The part of `BenchRanks` that the pairs use."""

    env: RankEnv
    world: BenchWorld
    hosts: list[HostFacts]


def company_of(world: World, ranks_per_node: int) -> BenchRanks:
    nodes = world.size // ranks_per_node
    node, local = divmod(world.rank, ranks_per_node)
    return BenchRanks(
        RankEnv(world.rank, world.size, local, ranks_per_node, node, nodes, "127.0.0.1", 1),
        BenchWorld(nodes=nodes, ranks_per_node=ranks_per_node, ranks=world.size, backend="gloo", device="cpu"),
        [HostFacts(node=each, host=f"host{each}", cores=1, ranks=1) for each in range(nodes)],
    )


def pairs(world: World, ranks_per_node: int, without: tuple = ()) -> list:
    control_group = ControlGroup(dist.new_group(backend="gloo"), lambda: None)
    bench_ranks = company_of(world, ranks_per_node)
    settings = BenchSettings(pairs=True, **FEW)
    pair_tests = PairTests(bench_ranks, settings, dist.group.WORLD, control_group)
    found = {pair.nodes: pair for known in pair_tests.play(3, without=without) for pair in known}
    return [found[nodes].model_dump(mode="json", exclude={"time"}) for nodes in sorted(found)]


@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(2, 1), (3, 1), (4, 2)])
def test_every_pair_of_nodes_is_measured_in_both_directions_and_all_ranks_agree(on_ranks, ranks, ranks_per_node):
    told = on_ranks(ranks, pairs, ranks_per_node=ranks_per_node)
    assert all(each == told[0] for each in told)
    nodes = ranks // ranks_per_node
    found = [Pair.model_validate({**each, "time": 0.0}, strict=False) for each in told[0]]
    assert [each.nodes for each in found] == [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    for each in found:
        assert each.hosts == tuple(f"host{node}" for node in each.nodes)
        assert (each.launch, each.nbytes, each.state) == (3, 2**16, "ok")
        assert each.latency is not None
        assert each.latency.n == 60  # 20 in each of 3 repetitions
        for timing in (each.there, each.back):
            assert timing is not None
            assert 6 <= timing.n <= 90
            assert 0 < timing.min_us <= timing.low_us <= timing.p50_us <= timing.high_us <= timing.max_us


def test_a_pair_that_has_failed_can_be_left_out(on_ranks):
    told = on_ranks(3, pairs, ranks_per_node=1, without=((0, 2),))
    assert [each["nodes"] for each in told[0]] == [[0, 1], [1, 2]]


def without_one(world: World) -> str:
    control_group = ControlGroup(dist.new_group(backend="gloo"), lambda: None)
    bench_ranks = company_of(world, 1)
    if world.rank == 1:
        control_group.gather([1.0, 0.0])
        control_group.barrier()
        return "left"
    try:
        list(PairTests(bench_ranks, BenchSettings(pairs=True, **FEW), dist.group.WORLD, control_group).play(0))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_pair_that_cannot_be_measured_is_named(on_ranks):
    first, second = on_ranks(2, without_one)
    assert second == "left"
    assert first.startswith("pair of nodes 0 and 1: ")
