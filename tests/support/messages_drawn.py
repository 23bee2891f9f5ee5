"""Messages drawn by hypothesis from what their classes declare."""

import dataclasses
import types
import typing
from typing import Annotated, Any, Literal

from hypothesis import strategies as st

from muster.launch.wire.codec import ANY_FLOAT, DEFAULTS, Bound

SMALL = 3  # elements of what a test draws


def drawn(hint: Any, bound: Bound | None = None) -> st.SearchStrategy[Any]:
    """Draw values of a declared type within its bounds, which come from the declaration as in the codec."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return drawn(arguments[0], arguments[1])
    if hint is Any:
        return st.recursive(st.none() | st.integers() | st.text(max_size=SMALL), st.lists, max_leaves=SMALL)
    if hint is None or hint is types.NoneType:
        return st.none()
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (types.UnionType, typing.Union):
        return st.one_of([drawn(each, bound) for each in arguments])
    if typing.is_typeddict(hint):
        return record(hint)
    if dataclasses.is_dataclass(hint):
        return instances(hint)  # type: ignore[arg-type]
    bound = bound or DEFAULTS.get(origin or hint) or Bound()
    if origin is tuple and arguments[-1] is ...:
        return st.lists(drawn(arguments[0]), max_size=SMALL if bound.most > SMALL else int(bound.most)).map(tuple)
    if origin is tuple:
        return st.tuples(*map(drawn, arguments))
    if origin is dict:
        most = SMALL if bound.most > SMALL else int(bound.most)
        return st.dictionaries(drawn(arguments[0]), drawn(arguments[1]), max_size=most)
    return scalar(hint, bound)


def scalar(hint: Any, bound: Bound) -> st.SearchStrategy[Any]:
    if hint is bool:
        return st.booleans()
    if hint is int:
        return st.integers(int(bound.least), int(bound.most))
    if hint is float:
        return st.floats() if bound is ANY_FLOAT else st.floats(bound.least, bound.most)
    if hint is str and bound.words is not None:
        return st.sampled_from(sorted(bound.words))
    return (st.text if hint is str else st.binary)(max_size=min(int(bound.most), 40))


def record(hint: Any) -> st.SearchStrategy[dict[str, Any]]:
    hints = typing.get_type_hints(hint, include_extras=True)
    needed = {name: drawn(each) for name, each in hints.items() if name in hint.__required_keys__}
    return st.fixed_dictionaries(needed, optional={name: drawn(hints[name]) for name in hints if name not in needed})


def instances(kind: type) -> st.SearchStrategy[Any]:
    return st.builds(
        kind, **{name: drawn(each) for name, each in typing.get_type_hints(kind, include_extras=True).items()}
    )
