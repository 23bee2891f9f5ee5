"""Variants of a test of which .ci/run tries only some, because it has 45 minutes; `pytest -m soak` tries the others."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def only_some(variants: Sequence[Any], kept: Collection[Any]) -> list[Any]:
    """Return the parameters of a test; those not in `kept` are of the soak."""
    unknown = [each for each in kept if each not in variants]
    assert not unknown, f"{unknown}: no variants"
    return [each if each in kept else pytest.param(each, marks=pytest.mark.soak) for each in variants]
