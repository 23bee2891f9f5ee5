"""Convert trees of plain values, such as a `state_dict()` without its tensors, to JSON and back.

    {"lr": [0.1, inf], "milestones": Counter({30: 1})}
    {"lr": [0.1, {"$": "float", "v": "inf"}], "milestones": {"$": "Counter", "v": [[30, 1]]}}

A record with the key `$` is a value that JSON cannot represent. Types are compared exactly: a subclass of dict or int
is refused, because its class would be lost. The caller's callback `leaf` stores the tensors.
"""

import base64
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, Final

from muster.jobs.basics.errors import BadCheckpointError, RefusedError

MAX_DEPTH: Final = 20  # each level takes up to three levels of JSON, of which a checkpoint allows 64
MAX_VALUES: Final = 200_000
MAX_TEXT: Final = 8 << 20  # limit for the total length of all texts and bytes
INLINE_BYTES: Final = 1024  # larger numpy arrays are stored as tensors
BIGGEST_INT: Final = 10**18  # a checkpoint's JSON limits the number of digits
MAPPINGS: Final[dict[type, str]] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
TORCH_TYPES: Final = {"dtype", "device", "Size"}
SCALARS: Final[dict[str, Callable[[str], Any]]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "bytes": base64.b64decode,
}
Leaf = Callable[[str, Any], Any]  # (path, value) -> its JSON record if it is stored as a tensor, else None


class Encoder:
    """Converter of values to JSON. `leaf` extracts tensors. The limits apply to all values together.

    Raises:
        RefusedError: if a value cannot be stored; the message begins with its path.
    """

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._values = self._text = 0
        self._open: list[int] = []  # ids of the containers around the current value

    def encode(self, value: Any, path: str) -> Any:
        """Return a value as JSON."""
        kind = type(value)
        self._values += 1
        self._text += len(value) if kind in (str, bytes) else 0
        if self._values > MAX_VALUES or self._text > MAX_TEXT:
            raise RefusedError(
                f"state: {path}: the state holds more than {MAX_VALUES} plain values or {MAX_TEXT >> 20} MB of text; "
                "keep long lists in a tensor or a numpy array"
            )
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if abs(value) < BIGGEST_INT else _record("int", hex(value))
        if kind is float:
            return value if math.isfinite(value) else _record("float", repr(value))
        if kind is bytes:
            return _record("bytes", _text_of(value))
        if kind is list or kind in MAPPINGS or kind is tuple:
            return self._container(value, kind, path)
        if kind.__module__ == "torch" and kind.__name__ in TORCH_TYPES:
            return _record(kind.__name__, list(value) if kind.__name__ == "Size" else str(value))
        if (record := self._leaf(path, value)) is not None:
            return record
        if "numpy" in sys.modules and (record := self._array(value, path)) is not None:
            return record
        what = "a function" if callable(value) and hasattr(value, "__name__") else f"a value of type {kind.__name__}"
        raise RefusedError(
            f"state: {path}: {what} cannot be stored; leave it out of state_dict(), or convert it to numbers, text, "
            "lists, dicts and tensors"
        )

    def _container(self, value: Any, kind: type, path: str) -> Any:
        if id(value) in self._open:
            raise RefusedError(f"state: {path}: a {kind.__name__} contains itself; store a tree without cycles")
        if len(self._open) == MAX_DEPTH:
            raise RefusedError(f"state: {path}: nested more than {MAX_DEPTH} levels deep; store a flatter tree")
        self._open.append(id(value))
        try:
            return self._mapping(value, kind, path) if kind in MAPPINGS else self._sequence(value, kind, path)
        finally:
            self._open.pop()

    def _mapping(self, value: Any, kind: type, path: str) -> Any:
        pairs = []
        for place, (key, each) in enumerate(value.items()):
            if type(key) not in (str, int):
                raise RefusedError(
                    f"state: {path}: the key {key!r:.40} of a {kind.__name__} is a {type(key).__name__}, which cannot "
                    "be stored; use text or whole numbers as keys"
                )
            pairs.append([self.encode(key, path), self.encode(each, f"{path}/{_step(key, place)}")])
        keys = list(value)
        # Keys of a checkpoint's JSON are sorted, so only a dict in that order may become a JSON object.
        if kind is dict and all(type(key) is str for key in keys) and keys == sorted(keys) and "$" not in value:
            return dict(pairs)
        return _record(MAPPINGS[kind], pairs)

    def _sequence(self, value: Any, kind: type, path: str) -> Any:
        written = [self.encode(each, f"{path}/{place}") for place, each in enumerate(value)]
        return written if kind is list else _record("tuple", written)

    def _array(self, value: Any, path: str) -> Any:
        """Return the record of a numpy array or scalar; None if the value is neither."""
        import numpy as np

        if not isinstance(value, (np.ndarray, np.generic)):
            return None
        if value.dtype.hasobject or value.dtype.fields or type(value) not in (np.ndarray, value.dtype.type):
            raise RefusedError(f"state: {path}: a numpy {value.dtype} cannot be stored; store an array of numbers")
        data: Any = None
        if value.nbytes > INLINE_BYTES:
            data = self._leaf(path, np.frombuffer(value.tobytes(), dtype=np.uint8))
        if data is None:
            data = self.encode(value.tobytes(), path)
        shape = list(value.shape) if isinstance(value, np.ndarray) else None
        return _record("numpy", [value.dtype.str, shape, data])


def decode(record: Any, tensor: Callable[[str], Any], path: str) -> Any:
    """Return the value of a record; `tensor` is a function that returns a tensor by its stored name.

    Raises:
        BadCheckpointError: if `Encoder` cannot have written the record.
    """
    try:
        return _decoded(record, tensor)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadCheckpointError(f"state: {path}: the checkpoint's value cannot be read: {error!s:.120}") from error


def _decoded(record: Any, tensor: Callable[[str], Any]) -> Any:
    if isinstance(record, list):
        return [_decoded(each, tensor) for each in record]
    if not isinstance(record, dict):
        return record
    if "$" not in record:
        return {key: _decoded(each, tensor) for key, each in record.items()}
    kind, value = record["$"], record["v"]
    if kind == "tuple":
        made: Any = tuple(_decoded(each, tensor) for each in value)
    elif kind in MAPPINGS.values():
        made = next(each for each, name in MAPPINGS.items() if name == kind)()
        for key, each in value:
            made[_decoded(key, tensor)] = _decoded(each, tensor)
    elif kind == "tensor":
        made = tensor(value)
    elif kind == "numpy":
        dtype, shape, data = value
        made = _numpy(dtype, shape, _decoded(data, tensor))
    elif kind in TORCH_TYPES:
        made = _torch(kind, value)
    else:
        made = SCALARS[kind](value)
    return made


def _numpy(dtype: str, shape: Any, raw: Any) -> Any:
    import numpy as np

    array = np.frombuffer(raw if isinstance(raw, bytes) else raw.cpu().numpy().tobytes(), dtype=np.dtype(dtype))
    return array[0] if shape is None else array.reshape(shape).copy()


def _torch(kind: str, value: Any) -> Any:
    import torch

    if kind == "dtype":
        made = getattr(torch, value.removeprefix("torch."))
        if not isinstance(made, torch.dtype):
            raise ValueError(f"{value} is not a tensor dtype")
        return made
    return torch.device(value) if kind == "device" else torch.Size(value)


def _record(kind: str, value: Any) -> dict[str, Any]:
    return {"$": kind, "v": value}


def _text_of(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _step(key: object, place: int) -> str:
    """Return a key as a part of a path, printable and at most 200 characters long."""
    text = str(key)
    return text if text.isprintable() and 0 < len(text) <= 200 else f"#{place}"
