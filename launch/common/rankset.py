"""Parse and format sets of ranks or nodes as text, such as `0,8-15`."""

from collections.abc import Iterable

from muster.jobs.basics.errors import UsageError


def parse(text: str, *, option: str, count: int) -> frozenset[int]:
    """Parse `0,8-15` as a set of numbers below `count`.

    Raises:
        UsageError: if the text has another form, or names a number that the run does not have.
    """
    valid = f"valid: 0-{count - 1}" if count > 1 else "valid: 0"
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise UsageError(
                f"{option}: {part.strip()!r} is neither a number nor a range; write it like 0,8-15 ({valid})"
            )
        low, high = int(first), int(last or first)
        if low > high:
            raise UsageError(f"{option}: {part.strip()!r} runs backwards; write {high}-{low}")
        if high >= count:
            raise UsageError(f"{option}: {high} is not in this run ({valid})")
        chosen.update(range(low, high + 1))
    return frozenset(chosen)


def fold(numbers: Iterable[int]) -> str:
    """Format numbers as sorted ranges, such as `0-2, 5`; "" if there are none."""
    members = set(numbers)
    starts = sorted(number for number in members if number - 1 not in members)
    ends = sorted(number for number in members if number + 1 not in members)
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in zip(starts, ends, strict=True))
