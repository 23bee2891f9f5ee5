"""Words of our messages that depend on a number."""


def counted(number: int, noun: str) -> str:
    """Write a number with its noun, which gets an s unless the number is 1: 1 rank, 2 ranks, 0 processes."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"
