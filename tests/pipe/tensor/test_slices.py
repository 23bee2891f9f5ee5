"""Slices of global tensors, and parts of slices, compared with enumerating every element."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.models.shapes import GptShape
from muster.jobs.train.models.gpt import assemble_gpt
from muster.jobs.world.world import World
from muster.pipe.tensor.slices import Box, TensorSlice
from support.tensor_parallel import CASES, build, split


@st.composite
def parts(draw) -> tuple[TensorSlice, int, int]:
    """Draw a slice of a tensor, and a range of its elements."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dimension = draw(st.sampled_from([None, *range(len(shape))]))
    start, stop = (0, 0) if dimension is None else sorted(draw(st.tuples(*[st.integers(0, shape[dimension])] * 2)))
    cut = TensorSlice("t", shape, dimension, start, stop)
    begin, end = sorted(draw(st.tuples(*[st.integers(0, math.prod(cut.local_shape))] * 2)))
    return cut, begin, end


def elements_of(shape: tuple[int, ...], box: Box) -> list[int]:
    """List the row-major elements of a box, in its own order."""
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    return [
        sum(at * stride for at, stride in zip(place, strides, strict=True))
        for place in itertools.product(*(range(*each) for each in box))
    ]


@given(parts())
def test_boxes_are_the_elements_of_a_range_in_order(drawn):
    cut, begin, end = drawn
    boxes = cut.boxes(begin, end)
    found = [element for _, box in boxes for element in elements_of(cut.shape, box)]
    assert found == elements_of(cut.shape, cut.box)[begin:end]
    assert [low for (low, _), _ in boxes] == [begin, *(high for (_, high), _ in boxes)][: len(boxes)]
    for (low, high), box in boxes:
        assert high - low == math.prod(stop - start for start, stop in box) > 0


@given(parts())
def test_boxes_are_few_however_many_rows_there_are(drawn):
    cut, begin, end = drawn
    assert len(cut.boxes(begin, end)) <= 2 * len(cut.shape) - 1


@given(parts())
def test_the_offset_is_told_where_elements_are_one_range(drawn):
    cut, _, _ = drawn
    found = elements_of(cut.shape, cut.box)
    is_one_range = found == [*range(min(found, default=0), max(found, default=-1) + 1)]
    if cut.offset is not None:
        assert is_one_range
        assert found[:1] in ([], [cut.offset])
    elif found and cut.local_shape != cut.shape:
        assert not is_one_range


def test_the_drawing_is_what_boxes_are():
    boxes = [box for _, box in TensorSlice("down", (6, 4), 1, 2, 4).boxes(1, 9)]
    assert boxes == [((0, 1), (3, 4)), ((1, 4), (2, 4)), ((4, 5), (2, 3))]


def test_a_range_outside_is_refused():
    with pytest.raises(ValueError, match=r"down: elements 1:13 are not within this rank's 0:12"):
        TensorSlice("down", (6, 4), 1, 2, 4).boxes(1, 13)


def slices_of(world: World) -> list[list]:
    found = []
    for case in CASES[:4]:
        made = split(build(case), case, world)
        shapes = {name: list(each.shape) for name, each in made.module.named_parameters()}
        assert {name: list(each.local_shape) for name, each in made.slices.items()} == shapes
        found.append([[name, each.shape, each.box, each.answers, each.has_first] for name, each in made.slices.items()])
    return found


def whole_shapes(shape: GptShape) -> dict[str, list[int]]:
    return {name: list(each.shape) for name, each in assemble_gpt(shape).named_parameters()}


@pytest.mark.ranks
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_slices_of_all_ranks_are_the_whole_model_exactly_once(on_ranks, degree):
    """Under the names of one process: `answers` covers every element once, with one first element per tensor."""
    for case, *of_ranks in zip(CASES[:4], *on_ranks(degree, slices_of), strict=True):
        shapes = whole_shapes(case.shape)
        for rank in of_ranks:
            assert {name: shape for name, shape, *_ in rank} == shapes
        for same_name in zip(*of_ranks, strict=True):
            name = same_name[0][0]
            answering = [elements_of(shapes[name], box) for _, _, box, answers, _ in same_name if answers]
            assert sorted(itertools.chain(*answering)) == [*range(math.prod(shapes[name]))]
            assert sum(first for *_, first in same_name) == 1
        split_names = {name for name, shape, box, *_ in of_ranks[0] if [0, *shape] != [0, *(stop for _, stop in box)]}
        matrices = {name for name, shape in shapes.items() if len(shape) > 1} - {"embed.position.weight"}
        assert degree == 1 or matrices <= split_names
