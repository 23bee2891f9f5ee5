"""States of Python's and numpy's global random number generators, as bytes of a fixed length. No torch."""

import random
import struct
import sys
from typing import Final

WORDS: Final = 624  # of a Mersenne Twister, used by Python's and numpy's global generators
TWISTER: Final = struct.Struct(f"<{WORDS}I I ? d")  # words, position, has a second Gaussian, its value


def python_state() -> bytes:
    """Return the state of Python's generator."""
    _, words, gauss = random.getstate()
    return TWISTER.pack(*words, gauss is not None, gauss or 0.0)


def set_python_state(data: bytes) -> None:
    """Restore the result of `python_state`."""
    *words, has_gauss, gauss = TWISTER.unpack(data)
    random.setstate((3, tuple(words), gauss if has_gauss else None))


def numpy_state() -> bytes:
    """Return the state of numpy's global generator."""
    _, words, place, has_gauss, gauss = sys.modules["numpy"].random.get_state()
    return TWISTER.pack(*map(int, words), place, bool(has_gauss), gauss)


def set_numpy_state(data: bytes) -> None:
    """Restore the result of `numpy_state`."""
    *words, place, has_gauss, gauss = TWISTER.unpack(data)
    numpy = sys.modules["numpy"]
    numpy.random.set_state(("MT19937", numpy.array(words, dtype=numpy.uint32), place, int(has_gauss), gauss))
