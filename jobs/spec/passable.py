"""Texts that a program can be handed, as an argument or in its environment."""

from typing import Annotated, Final

from pydantic import AfterValidator

MAX_STRING_BYTES: Final = 131_072  # MAX_ARG_STRLEN of Linux: one argument, or NAME=value, with the zero at its end


def _passable(text: str) -> str:
    """Return a text that a program can be handed."""
    if "\0" in text:
        raise ValueError("must not hold a zero byte (\\0): no program can be handed one")
    if (size := len(text.encode(errors="replace")) + 1) > MAX_STRING_BYTES:
        raise ValueError(f"must be shorter than {MAX_STRING_BYTES} bytes, which is Linux's limit, got {size}")
    return text


Passable = Annotated[str, AfterValidator(_passable)]
