"""Random numbers of layers: set their seeds, and make a second forward draw the same numbers as the first."""

from collections.abc import Callable, Iterator, Sequence
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


class RecordedSeeds:
    """The seeds of a CUDA graph: one state of the GPU's generator for each seeding, so that each replay can set others.

        recording   seed()        | kernels that draw from state 0 |  seed()        | ... from state 1 |
        replay      state 0: seed 17                                  state 1: seed 42

    A recorded kernel reads the seed and the offset of its state from the GPU's memory, where a replay writes them. It
    then draws the same numbers as an eager kernel after `seed_generators`.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._generator = torch.cuda.default_generators[device.index or 0]
        self._states = [self._generator.clone_state() for _ in range(count)]
        self._used = 0

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Make a graph read these states. Must be called before it is recorded."""
        for state in self._states:
            graph.register_generator_state(state)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the block, `seed` may be called. Afterwards the generator has its own state again."""
        own = self._generator.graphsafe_get_state()
        try:
            yield
        finally:
            self._generator.graphsafe_set_state(own)

    def seed(self, _: int) -> None:
        """Make the kernels recorded from now on draw from the next state; takes the place of `seed_generators`."""
        self._generator.graphsafe_set_state(self._states[self._used])
        self._used += 1

    def set(self, seeds: Sequence[int]) -> None:
        """Set the seeds of the next replay, in the order of the calls of `seed`."""
        for state, seed in zip(self._states, seeds, strict=True):
            state.manual_seed(seed)


class Hooks:
    """User callbacks, called within a step."""

    on_forward: Callable[[int, int], None] | None = None  # called with (stage, micro-batch) before every forward
    seeds: Callable[[int, int], int] | None = None  # (micro-batch, layer of the model) -> seed of that layer's forward
    seed: Callable[[int], None] = staticmethod(seed_generators)  # applies a seed; another one while a graph is recorded


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
