"""Small JSON files that contain the SHA-256 of their own body, so that any changed bit is detected.

    {"body":{...},"sha256":"..."}

The hash covers the bytes of the body as stored, so it is checked before anything is parsed. The hash detects damage but
does not prove who wrote the file, so the contents are validated like any untrusted input.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, Final

from muster.jobs.basics.errors import BadCheckpointError

MAX_BYTES: Final = 64 << 20
MAX_VALUES: Final = 4_000_000  # a parsed value takes about 20 times the memory of its text
MAX_DEPTH: Final = 64
MAX_DIGITS: Final = 19
_BEGIN: Final = b'{"body":'
_MIDDLE: Final = b',"sha256":"'
_END: Final = b'"}\n'
_TAIL: Final = len(_MIDDLE) + 64 + len(_END)


def seal(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a sealed file. Non-finite numbers become null."""
    try:
        data = _dump(body)
    except (ValueError, TypeError):  # NaN, or a mapping that is not a dict: convert these rare values
        data = _dump(_finite(body))
    return _BEGIN + data + _MIDDLE + hashlib.sha256(data).hexdigest().encode() + _END


def _dump(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def sha256_of(data: bytes) -> str:
    """Return the hash stored in sealed bytes."""
    return data[-len(_END) - 64 : -len(_END)].decode("ascii", errors="replace")


def unseal(data: bytes, where: object) -> dict[str, Any]:
    """Return the body of a sealed file.

    Raises:
        BadCheckpointError: if the file is damaged or Muster did not write it.
    """
    body = data[len(_BEGIN) : -_TAIL]
    if not data.startswith(_BEGIN) or len(data) < len(_BEGIN) + _TAIL or not data.endswith(_END):
        raise BadCheckpointError(f"{where}: not written by Muster, or truncated")
    if data[-_TAIL : -_TAIL + len(_MIDDLE)] != _MIDDLE or hashlib.sha256(body).hexdigest() != sha256_of(data):
        raise BadCheckpointError(f"{where}: damaged: its bytes do not match its own sha256")
    return parse(body, where)


def parse(data: bytes, where: object, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Parse a JSON object strictly: limits on size, depth and digits, no duplicate keys, no NaN.

    Raises:
        BadCheckpointError: if the data violates one of these rules.
    """
    if len(data) > max_bytes or sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise BadCheckpointError(f"{where}: larger than any file that Muster writes")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_once,
            parse_int=_bounded,
            parse_float=_real,
            parse_constant=_real,
        )
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise BadCheckpointError(f"{where}: invalid JSON: {error!s:.120}") from error
    if not isinstance(value, dict):
        raise BadCheckpointError(f"{where}: expected a JSON object, got {type(value).__name__}")
    if _is_deep(value):
        raise BadCheckpointError(f"{where}: nested deeper than any file that Muster writes")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def _bounded(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits is too long")
    return int(digits)


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"non-finite number: {text:.40}")
    return value


def _is_deep(value: object) -> bool:
    """Return True if a value is nested deeper than MAX_DEPTH, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
