"""Words of our messages that depend on a number, or on what else there is."""


def counted(number: int, noun: str) -> str:
    """Write a number with its noun, which gets an s unless the number is 1: 1 rank, 2 ranks, 0 processes."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"


def unknown(what: str, name: str, valid: tuple[str, ...]) -> str:
    """Say that a name is not in a table, with the nearest one that is."""
    import difflib

    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r}{hint} (valid: {', '.join(valid)})"
