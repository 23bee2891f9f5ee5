"""Typed messages as JSON lines. Each message class declares its fields and their bounds; other fields are refused.

A message is a frozen dataclass; a record inside one is a TypedDict. Supported field types: bool, int, float, str, bytes
(base64), None, Literal, unions, `tuple[T, ...]`, `tuple[A, B]`, `dict[str, T]`, TypedDict, and Any for JSON that is
not checked. Every field has a bound: its own (`Annotated[int, Bound(0, 65_535)]`), or the default of its type.

    class Held:                              {"message": "Held", "attempt": 0, "steps": 41}
        attempt: Attempt      ←──────→
        steps: Count

Only the standard library is used, because agents run on bare Pythons.
"""

import base64
import binascii
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, Final

from muster.jobs.basics.reading import parse_json

KIND: Final = "message"
LONGEST_FLOAT: Final = 1000  # bits of the largest integer that is read as a float
SHOWN: Final = 60  # maximum characters of an invalid value in an error message


class ProtocolError(ValueError):
    """A message violates the protocol."""


@dataclass(frozen=True)
class Bound:
    """The limits of a field: on the value of a number, or the length of text, bytes, tuples and dicts (`most` only).

    If `words` is given, a text must be one of them.
    """

    least: float = 0
    most: float = 1 << 53
    words: frozenset[str] | None = None


ANY_FLOAT: Final = Bound(-math.inf, math.inf)  # including NaN and infinity, which a loss may be
DEFAULTS: Final[Mapping[type, Bound]] = {
    int: Bound(-(1 << 53), 1 << 53),
    float: Bound(-1e15, 1e15),
    str: Bound(most=1 << 12),
    bytes: Bound(most=1 << 20),
    tuple: Bound(most=1 << 16),
    dict: Bound(most=1 << 16),
}

Read = Callable[[Any, str], Any]


def encode(message: object) -> bytes:
    """Encode a message as one line."""
    return (json.dumps({KIND: type(message).__name__, **vars(message)}, default=_spell) + "\n").encode()


def decode(line: bytes, kinds: Mapping[str, type]) -> Any:
    """Return the message in a line.

    Raises:
        ProtocolError: if the line is not JSON, is not a message of these kinds, or has an invalid field.
    """
    try:
        found = parse_json(line)
    except ValueError as error:
        raise ProtocolError(f"expected JSON: {error}") from error
    name = found.pop(KIND, None) if isinstance(found, dict) else None
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"expected one of {', '.join(kinds)}, got {_shown(name if name is not None else found)}")
    return kind(**_record(kind)(found, kind.__name__))


def fits(value: object, hint: Any) -> bool:
    """Return whether a JSON value is valid for a field of this type."""
    try:
        _reader(hint)(value, "")
    except ProtocolError:
        return False
    return True


def table(*kinds: type) -> dict[str, type]:
    """Return the message classes of one direction by name."""
    return {kind.__name__: kind for kind in kinds}


@cache
def _record(kind: Any) -> Read:
    """Return a reader for the fields of a dataclass or TypedDict. It refuses unknown and missing fields."""
    hints = typing.get_type_hints(kind, include_extras=True)
    readers = {name: _reader(hint) for name, hint in hints.items()}
    if typing.is_typeddict(kind):
        needed: Iterable[str] = kind.__required_keys__
    else:
        needed = [each.name for each in fields(kind) if each.default is MISSING]
    required = frozenset(needed)

    def read(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _wrong(where, "an object", value)
        if missing := required - value.keys():
            raise ProtocolError(f"{where}: lacks {', '.join(sorted(missing))}")
        if unknown := value.keys() - readers.keys():
            raise ProtocolError(f"{where}: has unknown fields {_shown(sorted(unknown))}")
        return {name: readers[name](each, f"{where}.{name}") for name, each in value.items()}

    return read


@cache
def _reader(hint: Any, bound: Bound | None = None) -> Read:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _reader(arguments[0], arguments[1])
    if hint is Any:
        return lambda value, where: value
    if hint is None or hint is types.NoneType:
        return _literal((None,))
    if origin is typing.Literal:
        return _literal(arguments)
    if origin in (types.UnionType, typing.Union):
        return _union([_reader(each, bound) for each in arguments])
    if typing.is_typeddict(hint):
        return _record(hint)
    bound = bound or DEFAULTS.get(origin or hint)
    if origin is tuple:
        return _tuple(arguments, bound or Bound())
    if origin is dict:
        return _dict(_reader(arguments[0]), _reader(arguments[1]), bound or Bound())
    if hint in SCALARS:
        return SCALARS[hint](bound or Bound())
    raise TypeError(f"{hint}: not a type of the protocol")


def _literal(allowed: tuple[Any, ...]) -> Read:
    def read(value: Any, where: str) -> Any:
        if not any(value is each or (value == each and type(value) is type(each)) for each in allowed):
            raise _wrong(where, " or ".join(map(repr, allowed)), value)
        return value

    return read


def _union(readers: list[Read]) -> Read:
    def read(value: Any, where: str) -> Any:
        failed: ProtocolError | None = None
        for each in readers:
            try:
                return each(value, where)
            except ProtocolError as error:
                failed = error
        assert failed is not None
        raise failed

    return read


def _tuple(arguments: tuple[Any, ...], bound: Bound) -> Read:
    repeated = _reader(arguments[0]) if arguments[-1] is ... else None
    single = [] if repeated else [_reader(each) for each in arguments]

    def read(value: Any, where: str) -> tuple[Any, ...]:
        most = bound.most if repeated else len(single)
        if not isinstance(value, list) or len(value) > most or (single and len(value) != most):
            raise _wrong(where, f"a list of {'at most ' if repeated else ''}{most:.0f}", value)
        if repeated:
            return tuple(repeated(each, where) for each in value)
        return tuple(one(each, where) for one, each in zip(single, value, strict=True))

    return read


def _dict(key: Read, item: Read, bound: Bound) -> Read:
    def read(value: Any, where: str) -> dict[Any, Any]:
        if not isinstance(value, dict) or len(value) > bound.most:
            raise _wrong(where, f"an object of at most {bound.most:.0f} fields", value)
        return {key(name, where): item(each, f"{where}.{ascii(name)[1:-1][:SHOWN]}") for name, each in value.items()}

    return read


def _bool(bound: Bound) -> Read:
    return _literal((True, False))


def _int(bound: Bound) -> Read:
    def read(value: Any, where: str) -> int:
        if type(value) is not int or not bound.least <= value <= bound.most:
            raise _wrong(where, f"a whole number from {bound.least:.0f} to {bound.most:.0f}", value)
        return value

    return read


def _float(bound: Bound) -> Read:
    def read(value: Any, where: str) -> float:
        number = type(value) is float or (type(value) is int and value.bit_length() <= LONGEST_FLOAT)
        if not number or (bound is not ANY_FLOAT and not bound.least <= value <= bound.most):
            raise _wrong(where, f"a number from {bound.least:g} to {bound.most:g}", value)
        return float(value)

    return read


def _str(bound: Bound) -> Read:
    def read(value: Any, where: str) -> str:
        if not isinstance(value, str) or len(value) > bound.most:
            raise _wrong(where, f"text of at most {bound.most:.0f} characters", value)
        if bound.words is not None and value not in bound.words:
            raise _wrong(where, "a known name", value)
        return value

    return read


def _bytes(bound: Bound) -> Read:
    def read(value: Any, where: str) -> bytes:
        try:
            data = base64.b64decode(value, validate=True)
        except (TypeError, ValueError, binascii.Error) as error:
            raise _wrong(where, "base64", value) from error
        if len(data) > bound.most:
            raise _wrong(where, f"at most {bound.most:.0f} bytes", value)
        return data

    return read


def _spell(value: object) -> str:
    assert isinstance(value, bytes), value
    return base64.b64encode(value).decode()


def _wrong(where: str, expected: str, value: Any) -> ProtocolError:
    return ProtocolError(f"{where}: expected {expected}, got {_shown(value)}")


def _shown(value: Any) -> str:
    if isinstance(value, list | dict | str) and len(value) > SHOWN:
        return f"{type(value).__name__} of {len(value)}"
    text = ascii(value)  # the value may contain control characters, and the message is shown in a terminal
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


SCALARS: Final[Mapping[Any, Callable[[Bound], Read]]] = {
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
    bytes: _bytes,
}
