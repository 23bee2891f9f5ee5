"""Words of our messages that depend on a number, or on what else there is."""


def counted(number: int, noun: str) -> str:
    """Write a number with its noun, with an s unless the number is 1: 1 rank, 2 epochs, 0 processes, 3 batches."""
    plural = noun + ("es" if noun.endswith(("s", "tch")) else "s")
    return f"{number} {noun if number == 1 else plural}"


def unknown(what: str, name: str, valid: tuple[str, ...]) -> str:
    """Say that a name is not in a table, with the nearest one that is."""
    import difflib

    near = [each for each in valid if each.lower() == name.lower()] or difflib.get_close_matches(name, valid, 1, 0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r}{hint} (valid: {', '.join(valid)})"


def spell_ranks(ranks: list[int]) -> str:
    """Write rank numbers for a message."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
