"""States of Python's and numpy's global random number generators, as bytes of a fixed length. No torch."""

import random
import struct
import sys
from typing import Final

WORDS: Final = 624  # state size of the Mersenne Twister, the global generator of both Python and numpy
TWISTER: Final = struct.Struct(f"<{WORDS}I I ? d")  # words, position, whether a second Gaussian is stored, its value


def python_state() -> bytes:
    """Return the state of Python's generator."""
    _, words, gauss = random.getstate()
    return TWISTER.pack(*words, gauss is not None, gauss or 0.0)


def set_python_state(data: bytes) -> None:
    """Restore a state returned by `python_state`."""
    *words, has_gauss, gauss = TWISTER.unpack(data)
    random.setstate((3, tuple(words), gauss if has_gauss else None))


def numpy_state() -> bytes:
    """Return the state of numpy's global generator."""
    _, words, place, has_gauss, gauss = sys.modules["numpy"].random.get_state()
    return TWISTER.pack(*map(int, words), place, bool(has_gauss), gauss)


def set_numpy_state(data: bytes) -> None:
    """Restore a state returned by `numpy_state`."""
    *words, place, has_gauss, gauss = TWISTER.unpack(data)
    numpy = sys.modules["numpy"]
    numpy.random.set_state(("MT19937", numpy.array(words, dtype=numpy.uint32), place, int(has_gauss), gauss))
