"""Parts of tensors as ranges of row-major elements, against walking every element."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.checkpoint.pieces import MAX_ELEMENTS, Piece, whole


@st.composite
def boxes(draw) -> Piece:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    bounds = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return Piece("t", "F32", shape, box=tuple((start, stop) for start, stop in bounds))


def elements_of(piece: Piece) -> list[int]:
    """List the row-major elements of a box, one by one."""
    strides = [math.prod(piece.shape[dimension + 1 :]) for dimension in range(len(piece.shape))]
    places = itertools.product(*(range(start, stop) for start, stop in piece.box or ()))
    return [sum(at * stride for at, stride in zip(place, strides, strict=True)) for place in places]


@given(boxes())
def test_runs_are_the_elements_of_a_box_in_order_and_as_few_as_can_be(piece: Piece) -> None:
    """Neighbouring runs never touch, unless a dimension of one element lies between them."""
    runs = list(piece.runs())
    assert [element for start, stop in runs for element in range(start, stop)] == elements_of(piece)
    assert all(start < stop for start, stop in runs)
    assert [piece.runs()[index] for index in range(len(piece.runs()))] == runs
    if all(size > 1 for size in piece.shape):
        assert all(first[1] < second[0] for first, second in itertools.pairwise(runs))


@given(boxes(), st.integers(0, 700), st.integers(0, 20))
def test_the_first_run_behind_an_element_is_found(piece: Piece, element: int, begin: int) -> None:
    runs = piece.runs()
    begin = min(begin, len(runs))
    found = [index for index in range(begin, len(runs)) if runs[index][1] > element]
    assert runs.first_after(element, begin) == (found[0] if found else len(runs))


def test_a_column_of_a_huge_matrix_costs_nothing_until_it_is_walked() -> None:
    piece = Piece("t", "F32", (2**40, 8), box=((0, 2**40), (3, 4)))
    assert len(piece.runs()) == 2**40
    assert piece.runs()[2**39] == (2**42 + 3, 2**42 + 4)
    assert piece.runs().first_after(2**42) == 2**39


def test_a_piece_knows_its_size_and_its_name_in_a_shard() -> None:
    box = Piece("model/w", "BF16", (4, 6), box=((1, 3), (0, 6)))
    flat = Piece("model/w", "F64", (4, 6), flat=(5, 9))
    assert (box.extent, box.elements, box.nbytes, box.key) == ((2, 6), 12, 24, "model/w[1:3,0:6]")
    assert (flat.extent, flat.elements, flat.nbytes, flat.key) == ((4,), 4, 32, "model/w[flat 5:9]")
    assert whole("model/w", "F32", (4, 6)).key == Piece("model/w", "F32", (4, 6), box=((0, 4), (0, 6))).key == "model/w"
    scalar = whole("optimizer/w/step", "I64", ())
    assert (scalar.elements, list(scalar.runs()), scalar.nbytes) == (1, [(0, 1)], 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "printable"),
        ({"name": "a\x1b[2J"}, "printable"),
        ({"name": "a\ud800"}, "printable"),
        ({"name": "x" * 1025}, "1024"),
        ({"name": "__metadata__"}, "printable"),
        ({"dtype": "F128"}, "unknown dtype"),
        ({"dtype": None}, "unknown dtype"),
        ({"shape": (2, -1)}, "whole number"),
        ({"shape": (2.0, 1)}, "whole number"),
        ({"shape": (True,)}, "whole number"),
        ({"shape": (1,) * 33}, "32 dimensions"),
        ({"shape": (2**30, 2**30)}, "elements"),
        ({"shape": (0, 2**50, 2**50)}, "elements"),
        ({"shape": (MAX_ELEMENTS + 1,)}, "whole number"),
        ({"box": ((0, 2),)}, "1 ranges"),
        ({"box": ((0, 3), (0, 3))}, "0:3 does not lie in 0:2"),
        ({"box": ((-1, 2), (0, 3))}, "-1:2 does not lie in 0:2"),
        ({"box": ((1, 0), (0, 3))}, "1:0 does not lie"),
        ({"box": ((0, 2, 1), (0, 3))}, "two whole numbers"),
        ({"flat": (0, 7)}, "0:7 does not lie in 0:6"),
        ({"flat": (0, 6.0)}, "two whole numbers"),
        ({"flat": (0, 6), "box": ((0, 2), (0, 3))}, "got both"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Piece(**{"name": "t", "dtype": "F32", "shape": (2, 3), **fields})
