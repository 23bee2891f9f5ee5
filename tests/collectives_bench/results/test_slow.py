"""Slow nodes and links are named from simulated pairs, whatever the noise; and nothing is named that is not slow."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.collectives_bench.records import Pair, SampleTimes, WorldRecord
from muster.collectives_bench.results.slow import Findings, slow

pytestmark = pytest.mark.slow

MB = 2**20
HEALTHY = 0.125  # GB/s

Rate = Callable[[int, int], float]  # (from, to) -> GB/s


def measured(
    nodes: int,
    rate: Rate,
    *,
    launches: int = 5,
    samples: int = 6,
    noise: float = 0.02,
    drift: float = 0.02,
    seed: int = 0,
) -> list[Pair]:
    """Simulate pairs: samples vary by `noise`, a link in a launch by `drift`, and one sample in twenty takes thrice."""
    draw = random.Random(seed)
    world = WorldRecord(nodes=nodes, ranks_per_node=1, ranks=nodes, backend="gloo", device="cpu")

    def one_way(source: int, target: int):
        level = 4 * MB / rate(source, target) / 1e3 * draw.lognormvariate(0, drift)
        return SampleTimes.of(
            [level * draw.lognormvariate(0, noise) * (3.0 if draw.random() < 0.05 else 1.0) for _ in range(samples)]
        )

    return [
        Pair(
            launch=launch,
            world=world,
            nodes=(one, other),
            hosts=(f"node{one}", f"node{other}"),
            nbytes=4 * MB,
            there=one_way(one, other),
            back=one_way(other, one),
            time=0.0,
        )
        for launch in range(launches)
        for one in range(nodes)
        for other in range(one + 1, nodes)
    ]


def healthy(source: int, target: int) -> float:
    return HEALTHY


def with_slow_node(node: int, factor: float = 0.75, *, sends: bool = True, receives: bool = True) -> Rate:
    return lambda a, b: HEALTHY * (factor if (sends and a == node) or (receives and b == node) else 1.0)


def with_slow_link(one: int, other: int, factor: float = 0.75, *, back: bool = True) -> Rate:
    return lambda a, b: HEALTHY * (factor if (a, b) == (one, other) or (back and (b, a) == (one, other)) else 1.0)


def names(found: Findings) -> list[tuple[str, tuple[int, ...], str]]:
    return [(each.kind, each.nodes, each.direction) for each in found.slow]


SIZES = st.integers(3, 9)
SEEDS = st.integers(0, 2**30)


@given(nodes=SIZES, seed=SEEDS, noise=st.floats(0.0, 0.15), drift=st.floats(0.0, 0.04), launches=st.integers(1, 7))
@settings(max_examples=150, deadline=None)
def test_nothing_is_named_where_all_links_are_alike(nodes, seed, noise, drift, launches):
    assert names(slow(measured(nodes, healthy, seed=seed, noise=noise, drift=drift, launches=launches))) == []


@given(nodes=SIZES, seed=SEEDS, noise=st.floats(0.0, 0.1), drift=st.floats(0.0, 0.03), data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_node_that_is_a_quarter_slower_is_named_and_nobody_else(nodes, seed, noise, drift, data):
    node = data.draw(st.integers(0, nodes - 1))
    found = slow(measured(nodes, with_slow_node(node), seed=seed, noise=noise, drift=drift))
    assert names(found) == [("node", (node,), "both")]
    assert found.slow[0].hosts == (f"node{node}",)


@given(nodes=SIZES, seed=SEEDS, noise=st.floats(0.0, 0.1), drift=st.floats(0.0, 0.03), data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_link_that_is_a_quarter_slower_is_named_and_not_its_nodes(nodes, seed, noise, drift, data):
    one = data.draw(st.integers(0, nodes - 2))
    other = data.draw(st.integers(one + 1, nodes - 1))
    found = slow(measured(nodes, with_slow_link(one, other), seed=seed, noise=noise, drift=drift))
    assert names(found) == [("link", (one, other), "both")]


@given(nodes=SIZES, seed=SEEDS, sends=st.booleans(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_node_that_is_slow_in_one_direction_is_said_to_be(nodes, seed, sends, data):
    node = data.draw(st.integers(0, nodes - 1))
    found = slow(measured(nodes, with_slow_node(node, sends=sends, receives=not sends), seed=seed))
    assert names(found) == [("node", (node,), "sends" if sends else "receives")]


@given(nodes=SIZES, seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_a_link_that_is_slow_one_way_is_named_from_its_slow_end(nodes, seed):
    found = slow(measured(nodes, with_slow_link(2, 0, back=False), seed=seed))
    assert names(found) == [("link", (2, 0), "sends")]
    assert "node2 → node0" in found.lines()[0]


@given(nodes=st.integers(5, 9), seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_a_slow_link_is_found_beside_a_slow_node(nodes, seed):
    def rate(a: int, b: int) -> float:
        return min(with_slow_node(0)(a, b), with_slow_link(2, 3, 0.6)(a, b))

    assert names(slow(measured(nodes, rate, seed=seed))) == [("node", (0,), "both"), ("link", (2, 3), "both")]


@given(seed=SEEDS, nodes=SIZES)
@settings(max_examples=60, deadline=None)
def test_where_all_is_noise_it_is_undecided_and_nobody_is_named(seed, nodes):
    found = slow(measured(nodes, healthy, seed=seed, noise=0.4, drift=0.3))
    assert names(found) == []
    assert "undecided" in found.lines()[-1]
    assert "measure again" in found.undecided


def test_the_evidence_is_in_the_line():
    found = slow(measured(4, with_slow_node(2), noise=0.001, drift=0.0))
    (line,) = found.lines()
    assert line.startswith(
        "slow node: node 2 (node2), all its links, 0.0938 GB/s, 25% less than the 0.125 GB/s of the others (25% at"
    )


def test_a_healthy_network_is_said_to_be_healthy():
    (line,) = slow(measured(4, healthy, noise=0.001)).lines()
    assert line.startswith("no slow node or link")


def test_two_nodes_cannot_tell_a_slow_link_from_a_slow_node():
    found = slow(measured(2, healthy))
    assert found.slow == ()
    assert "add a third node" in found.undecided


def test_of_two_nodes_the_slow_direction_can_be_told():
    found = slow(measured(2, with_slow_link(1, 0, back=False)))
    assert found.slow == ()
    assert found.undecided.startswith("node1 → node0 takes 1.3")


def test_two_groups_with_a_slow_way_between_them_are_not_told_as_single_links():
    found = slow(measured(6, lambda a, b: HEALTHY * (1.0 if a % 2 == b % 2 else 0.5), noise=0.005))
    assert found.slow == ()
    assert "9 of 15 pairs are slow" in found.undecided
    assert "node0, node2, node4 | node1, node3, node5" in found.undecided


def test_one_fast_pair_of_four_nodes_is_told_but_nobody_is_blamed():
    found = slow(measured(4, lambda a, b: HEALTHY * (1.0 if {a, b} == {0, 1} else 0.7), noise=0.005))
    assert found.slow == ()
    assert "node0 → node1 is faster than most links" in found.undecided


def test_nodes_of_one_host_are_told_apart_by_their_numbers():
    pairs = [pair.model_copy(update={"hosts": ("vm", "vm")}) for pair in measured(4, with_slow_link(1, 3), noise=0.001)]
    (line,) = slow(pairs).lines()
    assert line.startswith("slow link: node 1 ↔ node 3 (nodes 1 and 3), ")


def test_a_suspect_that_is_slow_in_some_launches_only_is_no_culprit():
    pairs = [
        pair
        for launch in range(5)
        for pair in measured(4, with_slow_link(0, 1) if launch < 3 else healthy, launches=1, noise=0.001, drift=0.0)
    ]
    found = slow(pairs)
    assert found.slow == ()
    assert found.undecided.startswith("node0 - node1 seems slow, but not in every launch")


@pytest.mark.parametrize("seed", range(20))
def test_one_noisy_launch_names_nobody_however_slow_a_link_was_in_it(seed):
    found = slow(measured(3, rate=lambda one, other: HEALTHY, launches=1, noise=0.3, drift=0.4, seed=seed))
    assert found.slow == ()
    assert "more launches" in found.undecided


def test_pairs_that_failed_are_left_out():
    pairs = measured(3, healthy)
    failed = [pair.model_copy(update={"state": "failed", "there": None, "back": None}) for pair in pairs]
    assert slow(failed).lines() == ["undecided: no pair was measured"]
    assert slow([]).slow == ()


@pytest.mark.parametrize("launches", [1, 2, 5])
def test_any_number_of_launches_will_do(launches):
    found = slow(measured(4, with_slow_node(1), launches=launches, noise=0.01))
    assert names(found) == [("node", (1,), "both")]
