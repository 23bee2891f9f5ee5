"""Parse and format sizes such as 512K, 36.9MB or 20e9, ranges such as 512K:1G, and named lists. K is 2^10 bytes."""

import re
from typing import Final

UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
LARGEST: Final = 64 * 2**30
STANDARD_FACTOR: Final = 2

LISTS: Final[dict[str, tuple[int, ...]]] = {
    # The sizes of a university course: 512 KB, 1, 10, 50, 100, 500 MB, 1 GB.
    "course": (512 * 2**10, *(count * 2**20 for count in (1, 10, 50, 100, 500)), 2**30),
    "small": tuple(2**power for power in range(3, 17)),
    "default": (512 * 2**10, *(count * 2**20 for count in (1, 4, 10, 32, 100))),
}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?(?:e\d{1,2})?)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str | float) -> int:
    """Parse a size; return its bytes.

    Raises:
        ValueError: if the text is not a size, or out of range.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return _in_range(text, str(text))
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"not a size: {text!r}; write bytes, or a number with K, M or G, such as 512K or 36.9MB")
    return _in_range(round(float(match[1]) * UNITS[match[2].upper()]), str(text))


def parse_sizes(text: str | float) -> list[int]:
    """Parse words separated by commas; return all sizes. A word is a size, a named list, or a range FROM:TO[:FACTOR].

    Raises:
        ValueError: if a word is neither a size, nor a list's name, nor a range.
    """
    if not isinstance(text, str):  # in a job file, 1e9 is a float
        return [parse_size(text)]
    if "," in text:
        return [size for word in text.split(",") for size in parse_sizes(word.strip())]
    if text in LISTS:
        return list(LISTS[text])
    if ":" not in text:
        return [parse_size(text)]
    first, last, factor = _range(text)
    sizes = []
    size = float(first)
    while round(size) <= last:
        sizes.append(round(size))
        size *= factor
    return sizes


def _range(text: str) -> tuple[int, int, float]:
    parts = text.split(":")
    if len(parts) > 3:
        raise ValueError(f"not a range of sizes: {text!r}; write FROM:TO or FROM:TO:FACTOR, such as 512K:1G:4")
    first, last = parse_size(parts[0]), parse_size(parts[1])
    try:
        factor = float(parts[2]) if len(parts) == 3 else float(STANDARD_FACTOR)
    except ValueError:
        factor = 0.0
    if not 1.0 < factor <= 2**20:
        raise ValueError(f"{text!r}: the factor must be more than 1, got {parts[2]}; write FROM:TO:FACTOR")
    if last < first:
        raise ValueError(f"{text!r}: the range ends below its start; write the smaller size first")
    return first, last, factor


def _in_range(size: int, text: str) -> int:
    if not 0 < size <= LARGEST:
        raise ValueError(f"size {text}: must be from 1 byte to 64G; choose another")
    return size


def size_text(nbytes: float) -> str:
    """Format a size with at most four digits, such as 512 KB, 36.9 MB or 12 B; KB is 2^10 bytes."""
    for unit, width in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if nbytes >= width:
            return f"{nbytes / width:.4g} {unit}"
    return f"{nbytes:.4g} B"


def time_text(time_s: float, figures: int = 4) -> str:
    """Format a time in a suitable unit, such as 35.1 us, 2.4 ms or 1.2 s."""
    unit, width = next(((unit, width) for unit, width in (("s", 1.0), ("ms", 1e-3)) if time_s >= width), ("us", 1e-6))
    return f"{time_s / width:.{figures}g} {unit}"
