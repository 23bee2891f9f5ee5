"""Rounds of pairs: everybody meets everybody once, and nobody is in two places."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.collectives_bench.rounds import orders, rounds

NODES = st.integers(0, 40)


@given(NODES)
def test_every_pair_meets_once(nodes):
    met = [pair for each in rounds(nodes) for pair in each]
    assert sorted(met) == list(combinations(range(nodes), 2))


@given(NODES)
def test_nobody_is_in_two_pairs_of_a_round(nodes):
    for each in rounds(nodes):
        assert max(Counter(node for pair in each for node in pair).values()) == 1


@given(st.integers(2, 40))
def test_as_few_rounds_as_can_be_and_of_an_odd_number_one_rests_in_each(nodes):
    found = rounds(nodes)
    assert len(found) == (nodes - 1 if nodes % 2 == 0 else nodes)
    assert {len(each) for each in found} == {nodes // 2}


def test_one_node_or_none_has_no_rounds():
    assert rounds(0) == rounds(1) == []


@given(NODES, st.integers(0, 4))
def test_every_repetition_has_all_rounds_and_every_rank_the_same_order(nodes, repetitions):
    found = orders(nodes, repetitions, "key")
    assert found == orders(nodes, repetitions, "key")
    assert [sorted(each) for each in found] == [sorted(rounds(nodes))] * repetitions


def test_repetitions_come_in_different_orders():
    first, *others = orders(12, 5, "key")
    assert any(other != first for other in others)


@pytest.mark.parametrize("nodes", [6])
def test_the_order_depends_on_the_key(nodes):
    assert orders(nodes, 4, "0/0") != orders(nodes, 4, "0/1")
