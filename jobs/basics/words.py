"""Words for messages: plurals, and suggestions for misspelt names."""

from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """Format a number with its noun, in the plural unless the number is 1: 1 rank, 0 processes, 3 batches."""
    plural = noun + ("es" if noun.endswith(("s", "tch")) else "s")
    return f"{number} {noun if number == 1 else plural}"


def unknown(what: str, name: str, valid: tuple[str, ...]) -> str:
    """Format the error that a name is not valid, and suggest the nearest valid name."""
    return f"unknown {what} {name!r}{did_you_mean(name, valid)} (valid: {', '.join(valid)})"


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` with the nearest valid name, or an empty string."""
    near = nearest(name, valid)
    return f"; did you mean {near!r}?" if near else ""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return the nearest valid name, ignoring case; "" if none is near."""
    import difflib

    if "," in name:
        return ""  # a list of names, for which there is no single suggestion
    plain, by_plain = name.lower(), {each.lower(): each for each in valid}
    near = difflib.get_close_matches(plain, by_plain, n=3)
    # Prefer swapped letters, the most common typo, which difflib counts as two edits: modle means model, not mode.
    near.sort(key=lambda candidate: sorted(candidate) != sorted(plain))
    return by_plain[near[0]] if near else ""


def spell_ranks(ranks: list[int]) -> str:
    """Format rank numbers for a message, such as `ranks 0, 2`."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
