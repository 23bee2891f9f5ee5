"""Keys of job files and their values that earlier versions had, and what to use now."""

from collections.abc import Sequence
from typing import Any, Final

from pydantic_core import ErrorDetails

_REPLICAS: Final = "jobs/examples/course/replicas.py shows replicas in one process"
_SERVER: Final = "jobs/examples/course/asynchronous.py shows training with a parameter server"

# A key, or a key and its value: the last version that had it, and what to do instead.
GONE: Final[dict[str | tuple[str, str], tuple[str, str]]] = {
    ("mode", "asynchronous"): ("0.1.0", f"choose mode bucketed or ddp; {_SERVER}"),
    ("sync", "asynchronous"): ("0.1.0", f"choose sync bucketed or ddp; {_SERVER}"),
    "servers": ("0.1.0", f"remove it; {_SERVER}"),
    ("mode", "data_parallel"): ("0.1.0", f"choose mode ddp, with a rank for each device; {_REPLICAS}"),
    ("sync", "data_parallel"): ("0.1.0", f"choose sync ddp, with a rank for each device; {_REPLICAS}"),
    "replicas": ("0.1.0", f"remove it, and choose mode ddp with as many ranks; {_REPLICAS}"),
    ("tokens", "auto"): ("0.1.0", "remove it for 4 equal slices, or list their lengths"),
    "layerwise": ("0.1.0", "remove it; jobs/examples/course/layerwise.py shows FSDP and a pipeline layer by layer"),
    "widths": ("0.1.0", "time norms with jobs/examples/kernels/norms.py"),
}


def gone(key: str, value: Any = None) -> str:
    """Return a sentence about a key, or a value of a key, that this version has no longer; "" for all others."""
    name = (key, value) if isinstance(value, str) else key
    if name not in GONE:
        return ""
    version, instead = GONE[name]
    return f"{version} was the last version with {'this key' if value is None else value}; {instead}"


def first_gone(errors: Sequence[ErrorDetails]) -> str:
    """Return the key, and the sentence, of the first error that is about a key or value that is gone; "" if none is."""
    for error in errors:
        key = str(error["loc"][-1]) if error["loc"] else ""
        sentence = gone(key) if error["type"] == "extra_forbidden" else gone(key, error["input"])
        if sentence:
            return f"{key}: {sentence}"
    return ""
