"""Random numbers of layers: set their seeds, and make a second forward draw the same numbers as the first."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.random import default_generator  # type: ignore[attr-defined]


def seed_generators(seed: int) -> None:
    """Seed the default generators of the host and of all GPUs, as `torch.manual_seed` does.

    `torch.manual_seed` also formats the call stack, which takes 130 us or more if CUDA is not initialized.
    """
    default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


class Hooks:
    """User callbacks, called within a step."""

    on_forward: Callable[[int, int], None] | None = None  # called with (stage, micro-batch) before every forward
    seeds: Callable[[int, int], int] | None = None  # (micro-batch, layer of the model) -> seed of that layer's forward


class RandomState:
    """A snapshot of the random state before a forward. The snapshot is empty if the user seeds every layer."""

    def __init__(self, x: Tensor, hooks: Hooks) -> None:
        self.device = x.device
        self.kept = hooks.seeds is None
        if self.kept:
            self.cpu = torch.get_rng_state()
            self.cuda = torch.cuda.get_rng_state(x.device) if x.is_cuda else None

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Restore the snapshot within the block; afterwards restore the state from before the block."""
        if not self.kept:
            yield
            return
        with torch.random.fork_rng([self.device] if self.cuda is not None else []):
            torch.set_rng_state(self.cpu)
            if self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda, self.device)
            yield
