"""Layout of flat tensors and shards, compared with drawings, and for any sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.zero.layout import Layout, Slice, runs

SIZES = st.lists(st.integers(0, 40), max_size=8).map(tuple)


def drawn(layout: Layout) -> list[str]:
    """Draw every rank's shard: a letter per element, a dot for gaps and padding."""
    lines = []
    for rank in range(layout.ranks):
        begin, end = layout.bounds(rank)
        line = ["."] * (end - begin)
        for at in layout.slices(rank):
            line[at.offset : at.offset + at.elements] = "abcdefgh"[at.tensor] * at.elements
        lines.append("".join(line))
    return lines


@pytest.mark.parametrize(
    ("sizes", "ranks", "align", "shards"),
    [
        ((7, 3, 6), 4, 1, ["aaaa", "aaab", "bbcc", "cccc"]),
        ((7, 3, 5), 4, 1, ["aaaa", "aaab", "bbcc", "ccc."]),
        ((3, 2), 2, 4, ["aaa.", "bb.."]),
        ((5, 1), 3, 2, ["aaaa", "a.b.", "...."]),
        ((1,), 3, 1, ["a", ".", "."]),
        ((0, 2), 2, 1, ["b", "b"]),
        ((), 2, 4, ["", ""]),
    ],
)
def test_shards_are_these(sizes, ranks, align, shards):
    assert drawn(Layout(sizes, ranks, align)) == shards


@given(sizes=SIZES, ranks=st.integers(1, 6), align=st.sampled_from([1, 2, 16]))
def test_every_element_is_held_once_and_shards_are_equally_long(sizes, ranks, align):
    layout = Layout(sizes, ranks, align)
    held = [
        (at.tensor, element)
        for rank in range(ranks)
        for at in layout.slices(rank)
        for element in range(at.start, at.stop)
    ]
    assert held == [(tensor, element) for tensor, size in enumerate(sizes) for element in range(size)]
    bounds = [layout.bounds(rank) for rank in range(ranks)]
    assert {end - begin for begin, end in bounds} == {layout.length // ranks}
    assert all(begin % align == 0 for begin, _ in bounds)
    assert all(offset % align == 0 for offset in layout.offsets)
    assert layout.length < sum(sizes) + align * (len(sizes) + ranks)  # no more than alignment needs
    for rank in range(ranks):
        begin, end = layout.bounds(rank)
        for at in layout.slices(rank):
            assert not at.elements or layout.offsets[at.tensor] + at.start == begin + at.offset
            assert at.offset + at.elements <= end - begin


@given(sizes=SIZES, ranks=st.integers(1, 4), align=st.sampled_from([1, 16]))
def test_tensors_and_gaps_fill_the_whole(sizes, ranks, align):
    layout = Layout(sizes, ranks, align)
    covered = [range(offset, offset + size) for offset, size in zip(layout.offsets, sizes, strict=True)]
    covered += [range(begin, end) for begin, end in layout.gaps] if sizes else []
    assert sorted(place for each in covered for place in each) == list(range(layout.length))


@given(sizes=SIZES, ranks=st.integers(1, 4))
def test_tensors_without_elements_are_the_first_rank_s(sizes, ranks):
    empty = [[at.tensor for at in Layout(sizes, ranks).slices(rank) if not at.elements] for rank in range(ranks)]
    assert empty == [[tensor for tensor, size in enumerate(sizes) if not size], *[[]] * (ranks - 1)]


def test_neighbours_of_one_kind_are_joined():
    slices = [Slice(tensor, 0, 2, 2 * tensor) for tensor in range(5)]
    joined = runs(slices, ["x", "x", None, "x", "y"])
    assert [[at.tensor for at in each] for each in joined] == [[0, 1], [3], [4]]
    assert runs(slices, [None] * 5) == []
