"""Random tokens for GPT, with a pause for each sample, so that a small training lasts long without using the CPU."""

import time

import torch
from torch.utils.data import Dataset


class PacedTokens(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples of `context` tokens and their targets, which depend only on the index."""

    def __init__(self, count: int, context: int, vocabulary: int, pause_s: float) -> None:
        draw = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, (count, context + 1), generator=draw)
        self.pause_s = pause_s

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.pause_s)
        return self.tokens[index, :-1], self.tokens[index, 1:]


def sets(context: int, vocabulary: int, pause_s: float) -> tuple[PacedTokens, None]:
    return PacedTokens(2048, context, vocabulary, pause_s), None
