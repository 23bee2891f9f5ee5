"""Keys of job files and their values that earlier versions had, and what to use now."""

from typing import Any, Final

# A key, or a key and its value: the last version that had it, and what to do instead.
GONE: Final[dict[str | tuple[str, str], tuple[str, str]]] = {
    "widths": ("0.1.0", "time norms with jobs/examples/kernels/norms.py"),
}


def gone(key: str, value: Any = None) -> str:
    """Return a sentence about a key, or a value of a key, that this version has no longer; "" for all others."""
    name = (key, value) if isinstance(value, str) else key
    if name not in GONE:
        return ""
    version, instead = GONE[name]
    return f"{key if value is None else f'{key}: {value}'} is gone, {version} was the last version with it; {instead}"
