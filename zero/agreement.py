"""Raise errors of one rank on all ranks, so that no rank waits in a collective for a failed rank.

rank 0   checks ── sends "fine" ─┐                 ┌── ValueError: rank 1: duplicate parameters
rank 1   checks ── sends error ──┴── both read both ┴── ValueError: duplicate parameters
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from muster.ddp.checks import device_of, difference_of, gather_json
from muster.ddp.means import Group

MISTAKES = (ValueError, TypeError, RuntimeError, KeyError, AssertionError)  # raised by torch.optim for bad values


@contextmanager
def together(group: Group) -> Iterator[None]:
    """Make all ranks fail if one fails within the block. This collective sends two small messages.

    Raises:
        ValueError: On the ranks that did not fail. The message has the number and the error of the first failed rank.
    """
    error: Exception | None = None
    try:
        yield
    except MISTAKES as caught:
        error = caught
    said = gather_json(None if error is None else str(error), group, device_of(group))
    if error is not None:
        raise error
    for rank, text in said.items():
        if text is not None:
            raise ValueError(f"rank {rank}: {text}")


def require_same(lines: list[str], group: Group, what: str) -> None:
    """Check that all ranks pass the same lines. A collective.

    Raises:
        ValueError: On every rank, if the lines differ. The message shows the first difference.
    """
    if differing := difference_of(lines, group, device_of(group)):
        raise ValueError(f"the ranks' {what} differ: {differing}; pass the same ones in the same order on every rank")


def settings_in_words(settings: Mapping[str, Any]) -> str:
    """Format hyper-parameters for comparison between ranks: numbers, strings, booleans, None, and lists of these."""
    said = {key: _value(value) for key, value in sorted(settings.items())}
    return ", ".join(f"{key}={value!r}" for key, value in said.items() if value is not _NOT_COMPARED)


_NOT_COMPARED = object()


def _value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.numel() == 1 else _NOT_COMPARED
    if isinstance(value, (list, tuple)):
        inner = [_value(each) for each in value]
        return _NOT_COMPARED if any(each is _NOT_COMPARED for each in inner) else inner
    return value if value is None or isinstance(value, (bool, int, float, str)) else _NOT_COMPARED
