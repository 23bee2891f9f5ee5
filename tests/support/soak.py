"""Variants of a test of which .ci/run tries only some, because it has 45 minutes; `pytest -m soak` tries the others."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def only_some(variants: Sequence[Any], kept: Collection[Any]) -> list[Any]:
    """Return the parameters of a test, with several as tuples; those not in `kept` are of the soak."""
    unknown = [each for each in kept if each not in variants]
    assert not unknown, f"{unknown}: no variants"
    values = [each if isinstance(each, tuple) else (each,) for each in variants]
    marks = [[] if each in kept else [pytest.mark.soak] for each in variants]
    return [pytest.param(*each, marks=more) for each, more in zip(values, marks, strict=True)]
