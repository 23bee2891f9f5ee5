"""What the benchmark of slow links tries, and what it takes for right."""

from collections import Counter
from itertools import combinations

import pytest
import slow_links
from slow_links import Case, cases_of, is_right

from muster.collectives_bench.results.slow import Findings, Slow

pytestmark = pytest.mark.command


def findings(*named: tuple[str, tuple[int, ...]]) -> Findings:
    slow = tuple(
        Slow(kind, nodes, tuple(f"node{node}" for node in nodes), "both", 1.33, 1.3, 0.09, 0.12)
        for kind, nodes in named
    )
    return Findings(slow, 0.01, "")


def test_ten_nodes_and_ten_pairs_of_all_there_are_and_some_healthy_boxes():
    found = Counter(cases_of(10, 4, seed=0))
    assert Counter(case.kind for case in found.elements()) == {"node": 10, "pair": 10, "healthy": 4}
    assert {case.nodes for case in found if case.kind == "pair"} == set(combinations(range(slow_links.NODES), 2))
    assert {case.nodes for case in found if case.kind == "node"} == {(node,) for node in range(slow_links.NODES)}
    assert cases_of(10, 4, seed=1) != cases_of(10, 4, seed=0)


def test_right_is_who_was_made_slow_and_everybody_else_is_a_false_name():
    node, pair, healthy = Case("node", (2,)), Case("pair", (1, 3)), Case("healthy")
    assert is_right(node, findings(("node", (2,)))) == (True, 0)
    assert is_right(node, findings(("node", (1,)))) == (False, 1)
    assert is_right(node, findings()) == (False, 0)
    assert is_right(pair, findings(("link", (1, 3)), ("node", (1,)))) == (True, 1)
    assert is_right(pair, findings(("node", (1,)), ("node", (3,)))) == (False, 2)
    assert is_right(healthy, findings()) == (True, 0)
    assert is_right(healthy, findings(("link", (0, 1)))) == (True, 1)
