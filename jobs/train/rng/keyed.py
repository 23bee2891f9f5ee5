"""Keyed random numbers: each depends only on its key, not on numbers drawn before.

A key mixes integers (a seed, the purpose, an epoch, a sample, a step) into 63 bits with the finalizer of splitmix64
(Steele, Lea & Flood 2014). `bits` does the same for a whole tensor of indices. So the random number for sample 17 is
the same on any rank, in any batch, with any release of torch.
"""

from typing import Final

import torch
from torch import Tensor

# The purpose of a random number: the second part of a key, so that different uses of a seed share no numbers.
SHUFFLE: Final = 1
AUGMENT: Final = 2
INITIALISE: Final = 3
DROPOUT: Final = 4
SYNTHETIC: Final = 5

_GAMMA: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB
_WORD: Final = (1 << 64) - 1


def key(*parts: int) -> int:
    """Mix integers, in the given order, into one integer in 0 .. 2**63 - 1."""
    return _absorb(0, *parts) >> 1


def bits(seed_key: int, index: Tensor, draw: int) -> Tensor:
    """Return 63 random bits for each index: `key(seed_key, draw, index[i])` as int64, in the shape of `index`."""
    state = _absorb(0, seed_key, draw)
    word = (index ^ _signed(state)) + _signed(_GAMMA)  # int64 wraps at 2**64, which equals _absorb's mask
    word = (word ^ _shift_right(word, 30)) * _signed(_FIRST)
    word = (word ^ _shift_right(word, 27)) * _signed(_SECOND)
    return _shift_right(word ^ _shift_right(word, 31), 1)


def uniform_ints(seed_key: int, index: Tensor, draw: int, bound: int) -> Tensor:
    """Return a number in 0 .. bound - 1 for each index; the bias of the remainder is below bound / 2**63."""
    return bits(seed_key, index, draw) % bound


def permutation(seed: int, epoch: int, samples: int) -> Tensor:
    """Return the order in which an epoch visits its samples, int64 (samples,): each of 0 .. samples - 1 once."""
    order = bits(key(seed, SHUFFLE, epoch), torch.arange(samples), 0)
    return torch.argsort(order, stable=True)  # stable: the result is unique even if two numbers are equal


def _absorb(state: int, *parts: int) -> int:
    for part in parts:
        word = ((state ^ (part & _WORD)) + _GAMMA) & _WORD
        word = ((word ^ (word >> 30)) * _FIRST) & _WORD
        word = ((word ^ (word >> 27)) * _SECOND) & _WORD
        state = word ^ (word >> 31)
    return state


def _shift_right(word: Tensor, by: int) -> Tensor:
    """Shift in zeros; torch's >> copies the sign bit of an int64."""
    return (word >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    """Return the int64 with the same 64 bits."""
    return word - (1 << 64) if word >> 63 else word
