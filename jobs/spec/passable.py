"""The type of texts that can be passed to a program, as an argument or in its environment."""

from typing import Annotated, Final

from pydantic import AfterValidator

MAX_STRING_BYTES: Final = 131_072  # Linux's MAX_ARG_STRLEN: one argument or NAME=value, with its trailing zero byte


def _passable(text: str) -> str:
    """Check that a text can be passed to a program."""
    if "\0" in text:
        raise ValueError("must not contain a zero byte (\\0), which no program can receive")
    if (size := len(text.encode(errors="replace")) + 1) > MAX_STRING_BYTES:
        raise ValueError(f"must be shorter than {MAX_STRING_BYTES} bytes, which is Linux's limit, got {size}")
    return text


Passable = Annotated[str, AfterValidator(_passable)]
