"""A user's file: sequences whose padding is unequal between micro-batches and ranks, and losses that count targets."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from muster.jobs.train.rng.keyed import permutation

TOKENS, WORDS = 8, 16
LENGTHS = (  # of the samples of each step, in the order in which ranks and micro-batches get them
    (0, 0, 0, 0, 0, 0, 8, 3, 1, 5, 8, 2),  # the first of two ranks, and two of four, have padding only
    (8, 1, 0, 0, 0, 2, 6, 0, 0, 0, 0, 1),  # with three micro-batches on each rank, some have padding only
    (8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 0, 0),
)


class Padded(torch.utils.data.Dataset[Any]):
    """One epoch of batches. The targets of padding are -100."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        order = permutation(0, 0, len(lengths)).tolist()
        self.place = {sample: place for place, sample in enumerate(order)}

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = (torch.arange(TOKENS + 1) * (index + 3) + index * index) % WORDS
        targets = tokens[1:].clone()
        targets[self.lengths[self.place[index]] :] = -100
        return tokens[:-1], targets


def padded(lengths: list[int] | None = None) -> tuple[Padded, Padded]:
    return Padded(lengths or [length for batch in LENGTHS for length in batch]), Padded([8, 0, 3, 1])


def counted(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()
