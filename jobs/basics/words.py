"""Words for messages: plurals, and suggestions for misspelt names."""

from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """Write a number with its noun, in the plural unless the number is 1: 1 rank, 2 epochs, 0 processes, 3 batches."""
    plural = noun + ("es" if noun.endswith(("s", "tch")) else "s")
    return f"{number} {noun if number == 1 else plural}"


def unknown(what: str, name: str, valid: tuple[str, ...]) -> str:
    """Say that a name is not in a table, with the nearest name that is."""
    return f"unknown {what} {name!r}{did_you_mean(name, valid)} (valid: {', '.join(valid)})"


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` with the nearest valid name, or an empty text."""
    near = nearest(name, valid)
    return f"; did you mean {near!r}?" if near else ""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return the nearest valid name, ignoring case; "" if none is near."""
    import difflib

    if "," in name:
        return ""  # several names: any suggestion would be a guess
    plain, by_plain = name.lower(), {each.lower(): each for each in valid}
    near = difflib.get_close_matches(plain, by_plain, n=3)
    # Swapped letters are the most common typo, but difflib counts two edits: modle should give model, not mode.
    near.sort(key=lambda candidate: sorted(candidate) != sorted(plain))
    return by_plain[near[0]] if near else ""


def spell_ranks(ranks: list[int]) -> str:
    """Write rank numbers for a message."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
