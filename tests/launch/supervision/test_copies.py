"""Which node keeps copies of which, and what the memory of the living nodes holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics.errors import BadCheckpointError
from muster.launch.supervision.copies import Holdings, domains_of, partners

OLD, NEW = "step-00000010.a000", "step-00000020.a000"


@given(st.lists(st.integers(0, 5), min_size=1, max_size=24), st.dictionaries(st.integers(0, 5), st.integers(0, 2)))
def test_a_partner_is_as_far_away_as_there_is_a_node(hosts: list[int], domains: dict[int, int]) -> None:
    of_slot = {slot: f"host{host}" for slot, host in enumerate(hosts)}
    named = {f"host{host}": f"rack{rack}" for host, rack in domains.items()}
    found = partners(of_slot, named).of
    assert found.keys() == of_slot.keys()
    place = {slot: (named.get(host, host), host) for slot, host in of_slot.items()}
    for slot, other in found.items():
        assert other != slot
        assert (other is None) == (len(hosts) == 1)
        for part in (0, 1):
            if other is not None and len({each[part] for each in place.values()}) > 1:
                different = any(each[0] != place[slot][0] for each in place.values())
                if part == 0 or not different:
                    assert place[other][part] != place[slot][part]


@pytest.mark.parametrize("racks", [[4, 4], [2, 2, 2], [1, 1, 1, 1], [3, 1, 2]])
def test_every_node_keeps_the_copies_of_one_other_node(racks: list[int]) -> None:
    groups = [[f"r{rack}n{number}" for number in range(count)] for rack, count in enumerate(racks)]
    hosts = dict(enumerate(host for group in groups for host in group))
    found = partners(hosts, domains_of(groups))
    assert sorted(found.of.values(), key=int) == sorted(hosts)  # type: ignore[arg-type]
    assert found.together == 0


def test_nodes_that_must_share_a_domain_or_a_host_are_counted() -> None:
    shared = partners({0: "a", 1: "b"}, domains_of([["a", "b"]]))
    assert (shared.of, shared.together) == ({0: 1, 1: 0}, 2)
    one_host = partners({0: "a", 1: "a", 2: "a"}, {})
    assert one_host.together == 3
    assert partners({0: "a"}, {}).of == {0: None}


def filled(names: dict[str, dict[int, list[int]]]) -> Holdings:
    """Return what nodes hold, from {checkpoint: {slot: its shards}} with three shards each."""
    holdings = Holdings()
    for name, of in names.items():
        for slot, shards in of.items():
            for shard in shards:
                holdings.note(slot, name, shard, 3, f"sha of {name} {shard}", 100)
    return holdings


def test_the_newest_checkpoint_of_which_the_living_nodes_have_every_shard_is_available() -> None:
    holdings = filled({OLD: {0: [0, 2], 1: [1, 0], 2: [2, 1]}, NEW: {0: [0], 1: [1, 0], 2: [2, 1]}})
    assert [each.name for each in holdings.available([0, 1, 2])] == [NEW, OLD]
    assert [each.name for each in holdings.available([0, 1])] == [OLD]  # shard 2 of the new one is on node 2 only
    assert holdings.available([0]) == []
    assert holdings.available([1, 2])[0].holders == {0: [1], 1: [1, 2], 2: [2]}


def test_a_checkpoint_is_safe_when_two_nodes_have_each_shard() -> None:
    ring: dict[int, int | None] = {0: 1, 1: 2, 2: 0}
    holdings = filled({NEW: {0: [0, 2], 1: [1, 0], 2: [2]}})
    assert not holdings.is_safe(NEW, [0, 1, 2], ring)
    holdings.note(2, NEW, 1, 3, f"sha of {NEW} 1", 100)
    assert holdings.is_safe(NEW, [0, 1, 2], ring)
    assert filled({NEW: {0: [0, 1, 2]}}).is_safe(NEW, [0], {0: None})
    assert not filled({NEW: {0: [0, 1]}}).is_safe(NEW, [0], {0: None})


def test_shards_with_different_contents_do_not_count() -> None:
    holdings = filled({NEW: {0: [0, 1, 2]}})
    holdings.note(1, NEW, 1, 3, "another sha", 100)
    assert holdings.available([0, 1]) == []
    assert [each.name for each in holdings.available([0])] == [NEW]


def test_lost_nodes_are_named_with_the_shards_that_only_they_had() -> None:
    holdings = filled({OLD: {0: [0, 2], 1: [1, 0], 2: [2, 1]}})
    holdings.lose(1)
    assert holdings.unavailable(OLD, [0, 2]) is None
    holdings.lose(2)
    assert holdings.unavailable(OLD, [0]) == ([1], {1, 2})
    holdings.keep_from("", only=True)
    assert holdings.unavailable(OLD, [0]) is None


def test_the_shards_of_a_node_are_listed_as_runs() -> None:
    holdings = filled({OLD: {0: [0, 2], 1: [1, 0], 2: [0, 1, 2]}})
    assert holdings.available([0, 1, 2])[0].runs == {0: ((0, 0), (2, 2)), 1: ((0, 1),), 2: ((0, 2),)}


def test_an_older_checkpoint_is_forgotten() -> None:
    holdings = filled({OLD: {0: [0, 1, 2]}, NEW: {0: [0, 1, 2]}})
    assert holdings.nbytes(0) == 600
    holdings.keep_from(NEW)
    assert (holdings.nbytes(0), holdings.nbytes(1)) == (300, 0)


@pytest.mark.parametrize(("name", "writer", "writers"), [("../etc", 0, 3), (NEW, 3, 3), (OLD, 0, 4)])
def test_an_invalid_report_is_refused(name: str, writer: int, writers: int) -> None:
    holdings = filled({OLD: {0: [0]}})
    with pytest.raises(BadCheckpointError):
        holdings.note(0, name, writer, writers, "sha", 1)


def test_of_many_incomplete_checkpoints_the_newest_count() -> None:
    holdings = Holdings()
    for step in range(20):
        holdings.note(0, f"step-{step:08d}.a000", 0, 1, "sha", 1)
    assert holdings.nbytes(0) == 8
    assert [each.step for each in holdings.available([0])] == [*range(19, 11, -1)]
