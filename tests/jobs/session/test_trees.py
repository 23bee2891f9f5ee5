"""Trees of plain values: the same after a way through a checkpoint's JSON, and refused by their path."""

import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics.errors import BadCheckpointError, RefusedError
from muster.jobs.checkpoint import sealed
from muster.jobs.session.state.trees import MAX_DEPTH, MAX_VALUES, Encoder, decode

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=30)
NUMPY = st.sampled_from(
    [np.float64(1.5), np.int32(-3), np.bool_(True), np.arange(6).reshape(2, 3), np.zeros((0, 2)), np.array(2.5, "<f2")]
)
TORCH = st.sampled_from([torch.bfloat16, torch.device("cuda", 1), torch.Size([2, 3])])
KEYS = st.text() | st.integers()
TREES = st.recursive(
    SCALARS | NUMPY | TORCH,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.sampled_from(["$", "v", "a"]), inner)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(KEYS, st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=20,
)


def no_tensor(path: str, value: object) -> None:
    return None


def there_and_back(value: Any) -> Any:
    """Take a value through the bytes of a manifest."""
    record = Encoder(no_tensor).encode(value, "x")
    body = sealed.unseal(sealed.seal({"meta": json.loads(json.dumps(record))}), "here")
    return decode(body["meta"], no_tensor, "x")


def same(one: Any, other: Any) -> bool:
    """Compare trees with their types and the order of their keys; NaN is NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other) and repr(one) == repr(other)


@given(TREES)
def test_a_tree_is_the_same_after_its_way_through_a_manifest(tree):
    assert same(there_and_back(tree), tree)


class Text(str):
    __slots__ = ()


CYCLE: list[Any] = []
CYCLE.append({"again": CYCLE})
DEEP: list[Any] = []
for _ in range(MAX_DEPTH + 1):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("value", "path", "why"),
    [
        ({"lr_lambdas": [lambda step: step]}, "x/lr_lambdas/0", "a function cannot be stored"),
        ({"a": {"b": object()}}, "x/a/b", "a value of type object cannot be stored"),
        (Text("a"), "x", "a value of type Text"),
        (namedtuple("Pair", "a b")(1, 2), "x", "a value of type Pair"),
        (defaultdict(list), "x", "a value of type defaultdict"),
        ({1.5: 2}, "x", "the key 1.5 of a dict is a float"),
        ({(1, 2): 2}, "x", "is a tuple, which cannot be stored; use text or whole numbers"),
        (CYCLE, "x/0/again", "a list contains itself"),
        (DEEP, "x" + MAX_DEPTH * "/0", "nested more than"),
        (1j, "x", "a value of type complex"),
        (np.array([object()]), "x", "a numpy object cannot be stored"),
        ([0] * MAX_VALUES, f"x/{MAX_VALUES - 1}", "more than 200000 plain values"),
        ("a" * (9 << 20), "x", "MB of text; keep long lists in a tensor"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_its_path(value, path, why):
    with pytest.raises(RefusedError) as refused:
        Encoder(no_tensor).encode(value, "x")
    assert str(refused.value).startswith(f"state: {path}: ")
    assert why in str(refused.value)


@pytest.mark.parametrize(
    "record",
    [{"$": "no such"}, {"$": "no such", "v": 1}, {"$": "float", "v": "x"}, {"$": "dict", "v": 3}, {"$": "tensor"}],
)
def test_a_record_of_another_form_is_a_bad_checkpoint(record):
    with pytest.raises(BadCheckpointError, match="state: x: the checkpoint's value cannot be read"):
        decode(record, no_tensor, "x")


def test_the_deepest_tree_that_is_stored_fits_a_manifest():
    tree: Any = {2: 1}
    for _ in range(MAX_DEPTH - 1):
        tree = {2: tree, 1: 0}
    assert same(there_and_back(tree), tree)
