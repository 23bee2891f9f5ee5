"""Keys of job files and their values that earlier versions had, and what to use now."""

from collections.abc import Sequence
from typing import Any, Final

from pydantic_core import ErrorDetails

_SERVER: Final = "jobs/examples/course/asynchronous.py shows training with a parameter server"

# A key, or a key and its value: the last version that had it, and what to do instead.
GONE: Final[dict[str | tuple[str, str], tuple[str, str]]] = {
    ("mode", "asynchronous"): ("0.1.0", f"choose mode bucketed or ddp; {_SERVER}"),
    ("sync", "asynchronous"): ("0.1.0", f"choose sync bucketed or ddp; {_SERVER}"),
    "servers": ("0.1.0", f"remove it; {_SERVER}"),
}


def gone(key: str, value: Any = None) -> str:
    """Return a sentence about a key, or a value of a key, that this version has no longer; "" for all others."""
    name = (key, value) if isinstance(value, str) else key
    if name not in GONE:
        return ""
    version, instead = GONE[name]
    return f"{key if value is None else f'{key}: {value}'} is gone, {version} was the last version with it; {instead}"


def first_gone(errors: Sequence[ErrorDetails]) -> str:
    """Return the sentence about the first key or value that is gone, from the errors of a section; "" if none is."""
    for error in errors:
        key = str(error["loc"][-1]) if error["loc"] else ""
        sentence = gone(key) if error["type"] == "extra_forbidden" else gone(key, error["input"])
        if sentence:
            return sentence
    return ""
