"""Typed messages as JSON lines. Each message class declares its fields and their bounds; other fields are refused.

A message is a frozen dataclass; a record inside one is a TypedDict. Supported field types: bool, int, float, str, bytes
(base64), None, Literal, unions, `tuple[T, ...]`, `tuple[A, B]`, `dict[str, T]`, TypedDict, another message, and Any
for JSON that is not checked. Every field has a bound: its own (`Annotated[int, Bound(0, 65_535)]`), or the default of
its type.

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
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, wraps
from typing import Any, Final

from muster.jobs.basics.reading import parse_json

KIND: Final = "message"
TAG: Final = "report"  # the field that distinguishes the records of a union
LONGEST_FLOAT: Final = 1000  # bits of the largest integer that is read as a float
SHOWN: Final = 60  # maximum characters of an invalid value in an error message


class ProtocolError(ValueError):
    """A message violates the protocol. Readers add the name of each field that they are in, from the innermost one."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.path = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text

    def within(self, name: str) -> "ProtocolError":
        """Return the same error with the name of the enclosing field or message."""
        self.path = f"{name}.{self.path}" if self.path else name
        return self


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

Read = Callable[[Any], Any]


def _remember_last(encode: Callable[[object], bytes]) -> Callable[[object], bytes]:
    """Let a message that is sent to many nodes in a row be encoded only once. Messages are frozen."""
    last: tuple[object, bytes] = (None, b"")

    @wraps(encode)
    def remembering(message: object) -> bytes:
        nonlocal last
        found = last  # once, because another thread may encode a message, too
        if found[0] is not message:
            last = found = message, encode(message)
        return found[1]

    return remembering


@_remember_last
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
    try:
        return kind(**_record(kind)(found))
    except ProtocolError as error:
        raise error.within(kind.__name__) from None


def fits(value: object, hint: Any) -> bool:
    """Return whether a JSON value is valid for a field of this type."""
    try:
        _reader(hint)(value)
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
    names = readers.keys()

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _wrong("an object", value)
        if value.keys() != names:
            if missing := required - value.keys():
                raise ProtocolError(f"lacks {', '.join(sorted(missing))}")
            if unknown := value.keys() - names:
                raise ProtocolError(f"has unknown fields {_shown(sorted(unknown))}")
        found, name = {}, ""
        try:
            for name, each in value.items():
                found[name] = readers[name](each)
        except ProtocolError as error:
            raise error.within(name) from None
        return found

    return read


@cache
def _reader(hint: Any, bound: Bound | None = None) -> Read:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _reader(arguments[0], arguments[1])
    if hint is Any:
        return lambda value: value
    if hint is None or hint is types.NoneType:
        return _literal((None,))
    if origin is typing.Literal:
        return _literal(arguments)
    if origin in (types.UnionType, typing.Union):
        return _union(arguments, bound)
    if typing.is_typeddict(hint):
        return _record(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return _message(hint)
    bound = bound or DEFAULTS.get(origin or hint)
    if origin is tuple:
        return _tuple(arguments, bound or Bound())
    if origin is dict:
        return _dict(_reader(arguments[0]), _reader(arguments[1]), bound or Bound())
    if hint in SCALARS:
        return SCALARS[hint](bound or Bound())
    raise TypeError(f"{hint}: not a type of the protocol")


def _message(kind: Any) -> Read:
    record = _record(kind)
    return lambda value: kind(**record(value))


def _literal(allowed: tuple[Any, ...]) -> Read:
    kinds = {(type(each), each) for each in allowed}

    def read(value: Any) -> Any:
        kind = type(value)
        if kind in (dict, list) or (kind, value) not in kinds:
            raise _wrong(" or ".join(map(repr, allowed)), value)
        return value

    return read


def _union(arguments: tuple[Any, ...], bound: Bound | None) -> Read:
    if types.NoneType in arguments:
        some = tuple(each for each in arguments if each is not types.NoneType)
        other = _union(some, bound) if len(some) > 1 else _reader(some[0], bound)
        return lambda value: None if value is None else other(value)
    tagged = {tag: _reader(each, bound) for each in arguments for tag in _tags(each)}
    # records without a tag first: an error, which takes as long as ten records to make, is then rare
    readers = [_reader(each, bound) for each in sorted(arguments, key=lambda each: bool(_tags(each)))]

    def read(value: Any) -> Any:
        if isinstance(value, dict) and isinstance(tag := value.get(TAG), str) and tag in tagged:
            return tagged[tag](value)
        failed: ProtocolError | None = None
        for each in readers:
            try:
                return each(value)
            except ProtocolError as error:
                failed = error
        assert failed is not None
        raise failed

    return read


def _tags(hint: Any) -> tuple[Any, ...]:
    """Return the values that the tag of a TypedDict may have; () if it has none."""
    return typing.get_args(typing.get_type_hints(hint).get(TAG)) if typing.is_typeddict(hint) else ()


def _tuple(arguments: tuple[Any, ...], bound: Bound) -> Read:
    repeated = _reader(arguments[0]) if arguments[-1] is ... else None
    single = [] if repeated else [_reader(each) for each in arguments]

    def read(value: Any) -> tuple[Any, ...]:
        most = bound.most if repeated else len(single)
        if not isinstance(value, list) or len(value) > most or (single and len(value) != most):
            raise _wrong(f"a list of {'at most ' if repeated else ''}{most:.0f}", value)
        if repeated:
            return tuple(map(repeated, value))
        return tuple([one(each) for one, each in zip(single, value, strict=True)])

    return read


def _dict(key: Read, item: Read, bound: Bound) -> Read:
    def read(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict) or len(value) > bound.most:
            raise _wrong(f"an object of at most {bound.most:.0f} fields", value)
        found, name = {}, ""
        for name, each in value.items():
            known = key(name)
            try:
                found[known] = item(each)
            except ProtocolError as error:
                raise error.within(ascii(name)[1:-1][:SHOWN]) from None
        return found

    return read


def _bool(bound: Bound) -> Read:
    return _literal((True, False))


def _int(bound: Bound) -> Read:
    least, most = bound.least, bound.most

    def read(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise _wrong(f"a whole number from {least:.0f} to {most:.0f}", value)
        return value

    return read


def _float(bound: Bound) -> Read:
    least, most = bound.least, bound.most

    def read(value: Any) -> float:
        if type(value) is float and least <= value <= most:
            return value
        number = type(value) is float or (type(value) is int and value.bit_length() <= LONGEST_FLOAT)
        if not number or (bound is not ANY_FLOAT and not bound.least <= value <= bound.most):
            raise _wrong(f"a number from {bound.least:g} to {bound.most:g}", value)
        return float(value)

    return read


def _str(bound: Bound) -> Read:
    most, words = bound.most, bound.words

    def read(value: Any) -> str:
        if not isinstance(value, str) or len(value) > most:
            raise _wrong(f"text of at most {most:.0f} characters", value)
        if words is not None and value not in words:
            raise _wrong("a known name", value)
        return value

    return read


def _bytes(bound: Bound) -> Read:
    def read(value: Any) -> bytes:
        try:
            data = base64.b64decode(value, validate=True)
        except (TypeError, ValueError, binascii.Error) as error:
            raise _wrong("base64", value) from error
        if len(data) > bound.most:
            raise _wrong(f"at most {bound.most:.0f} bytes", value)
        return data

    return read


def _spell(value: object) -> str | dict[str, Any]:
    if is_dataclass(value):
        return vars(value)
    assert isinstance(value, bytes), value
    return base64.b64encode(value).decode()


def _wrong(expected: str, value: Any) -> ProtocolError:
    return ProtocolError(f"expected {expected}, got {_shown(value)}")


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
