"""What a call that must fail has said."""

from collections.abc import Callable

Errors = type[Exception] | tuple[type[Exception], ...]


def said_by(call: Callable[[], object], kind: Errors) -> str:
    """Return the words of the error that a call raises, or say that none was."""
    try:
        call()
    except kind as error:
        return str(error)
    return "nothing was raised"


def told_by(call: Callable[[], object]) -> str:
    """Return the kind and the words of whatever error a call raises, or say that none was."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
