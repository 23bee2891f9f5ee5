"""Parse and write node lists in the notation of Slurm and pdsh: `rack[1-2]n[08-11]-ib,login`.

Names keep their order, and a repeated name counts only at its first position. In a term with several brackets the last
one varies fastest. Zero padding is kept: `n[08-11]` is n08 n09 n10 n11.

`fold` keeps the order of names, so only consecutive names share a bracket: b1,a1,a2 becomes `b1,a[1-2]`.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, product
from math import prod
from typing import Final

from muster.jobs.basics.errors import UsageError

MAX_NAMES: Final = 100_000
MAX_DIGITS: Final = 18  # longer numbers are treated as text

_FORBIDDEN: Final = re.compile(r"[\s,\[\]]")
_TERM: Final = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_BRACKET: Final = re.compile(r"\[([^\[\]]*)\]")
_RANGE: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_FIELDS: Final = re.compile(f"([0-9]{{1,{MAX_DIGITS}}})")


def expand(text: str, most: int = MAX_NAMES) -> list[str]:
    """Return the names of a node list in order, each once.

    Raises:
        UsageError: if the text is empty or malformed, or expands to more than `most` names.
    """
    if not text.strip():
        raise UsageError("node list: is empty; expected names such as n01,n02 or n[01-16]")
    names: dict[str, None] = {}
    total = 0
    for term in _terms(text):
        # Text and brackets alternate in a term: even parts are text, odd parts are the contents of brackets.
        parts = _BRACKET.split(term)
        choices = [_Choices(part, text) for part in parts[1::2]]
        total += prod(choice.count for choice in choices)
        if total > most:
            raise UsageError(f"node list {_short(text)}: more than {most:,} names; give fewer")
        for numbers in product(*choices):
            name = "".join(piece for pair in zip(parts[::2], (*numbers, ""), strict=True) for piece in pair)
            names[name] = None
    return list(names)


def fold(names: Iterable[str]) -> str:
    """Return a short node list that expands to the same names in the same order, each once.

    Raises:
        UsageError: if a name is empty or contains a space, a comma or a bracket.
    """
    ordered = list(dict.fromkeys(names))
    for name in ordered:
        if not name or _FORBIDDEN.search(name):
            raise UsageError(f"node list: {name!r} is not a name; expected no spaces, commas or brackets")
    # A term is a name split by `re.split`: text at even positions, numbers at odd ones; each number becomes a list.
    terms = [[[part] for part in _FIELDS.split(name)] for name in ordered]
    # Adjacent terms that differ in one field only are merged. Fields are processed from the last to the first, so that
    # earlier ones are still single numbers, and the last bracket varies fastest, as in `expand`.
    for field in range(max((len(term) for term in terms), default=0) - 2, 0, -2):
        terms = list(_merge(terms, field))
    return ",".join("".join(_spell(part) if place % 2 else part[0] for place, part in enumerate(t)) for t in terms)


def _merge(terms: list[list[list[str]]], field: int) -> Iterator[list[list[str]]]:
    """Merge adjacent terms that differ in one field only."""
    for _, group in groupby(terms, key=lambda term: (len(term), term[:field], term[field + 1 :])):
        alike = list(group)
        if field < len(alike[0]):
            alike[0][field] = [number for term in alike for number in term[field]]
            alike = alike[:1]
        yield from alike


def _spell(numbers: Sequence[str]) -> str:
    """Format one field: a single number is unchanged, several numbers become a bracket of ranges."""
    if len(numbers) == 1:
        return numbers[0]
    ranges: list[list[str]] = []
    for number in numbers:
        if ranges and number == str(int(ranges[-1][-1]) + 1).zfill(len(ranges[-1][0])):
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return f"[{','.join('-'.join(ends) for ends in ranges)}]"


class _Choices:
    """The values of one bracket. They can be counted without listing them."""

    def __init__(self, inside: str, text: str) -> None:
        self.ranges = [_range(item.strip(), text) for item in inside.split(",")]
        self.count = sum(last - first + 1 for first, last, _ in self.ranges)

    def __iter__(self) -> Iterator[str]:
        return (str(number).zfill(width) for first, last, width in self.ranges for number in range(first, last + 1))


def _range(item: str, text: str) -> tuple[int, int, int]:
    """Return the first number, the last number and the width of `8`, `08` or `08-11`."""
    match = _RANGE.fullmatch(item)
    if match is None or len(item) > 2 * MAX_DIGITS + 1:
        raise _bad(text, f"[{item}] is not a number or a range such as 08-11")
    first, last = match[1], match[2] or match[1]
    if int(last) < int(first):
        raise _bad(text, f"[{item}] is reversed; write [{last}-{first}]")
    if len(last) < len(first) or (last.startswith("0") and len(last) > len(first)):
        raise _bad(text, f"[{item}] starts and ends with different widths; write [{first}-{last.zfill(len(first))}]")
    return int(first), int(last), len(first)


def _terms(text: str) -> Iterator[str]:
    """Split a node list at the commas outside brackets.

    Raises:
        UsageError: if brackets do not match, a name is missing between commas, or a name contains a space.
    """
    position = 0
    while True:
        match = _TERM.match(text, position)
        term = match.group().strip() if match else ""
        end = match.end() if match else position
        if end < len(text) and text[end] != ",":
            raise _bad(text, f"the bracket at character {end + 1} is unmatched, or inside another bracket")
        if not term:
            raise _bad(text, f"no name before character {end + 1}; remove the comma")
        if re.search(r"\s", _BRACKET.sub("", term)):
            raise _bad(text, f"a space in {term!r}; separate names with commas")
        yield term
        if end == len(text):
            return
        position = end + 1


def _bad(text: str, problem: str) -> UsageError:
    return UsageError(f"node list {_short(text)}: {problem}")


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
