"""Seed the CPU's random number generators that a user's code may use: torch's, Python's and NumPy's."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch.random import default_generator  # type: ignore[attr-defined]


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Seed the generators within the block, and restore them afterwards."""
    numpy = sys.modules.get("numpy")
    torch_state, python_state = default_generator.get_state(), random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    seed_all(seed)
    try:
        yield
    finally:
        default_generator.set_state(torch_state)
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)


def seed_all(seed: int) -> None:
    """Seed the generators; NumPy's only if it is imported."""
    default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
