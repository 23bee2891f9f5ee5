"""Let only one stage of a process draw random numbers at a time, so that results do not depend on thread timing.

    tick 3    stage 0: none     ──┐         a wave: at most one of its stages draws
              stage 1: dropout  ──┴──►
              stage 2: dropout       ────►   the next wave

On CPUs, all threads draw from one generator. Stages on one GPU share that GPU's generator. If a generator's state
changes during a wave, a stage of that wave has drawn random numbers. A new stage runs only together with stages that
are known to draw no random numbers.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

Key = tuple[int, tuple[tuple[type, bool], ...]]  # stage number; type and training mode of each module


class Turns:
    """A scheduler that divides each tick into waves, and records which stages draw random numbers."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        stages = Counter(each for each in devices if each.type == "cuda")
        self._shared = [device for device, count in stages.items() if count > 1]
        self._draws: dict[Key, bool] = {}

    def keys(self, stages: Sequence[nn.Module]) -> list[Key]:
        """Return a key for each stage that changes when its modules or their training modes change."""
        return [
            (number, tuple((type(each), each.training) for each in stage.modules()))
            for number, stage in enumerate(stages)
        ]

    def waves(self, keys: Sequence[Key], tick: Iterable[int]) -> Iterator[list[int]]:
        """Yield groups of a tick's stages that may run together.

        The caller waits for each group before it takes the next one.
        """
        draws = {stage: self._draws.get(keys[stage]) for stage in sorted(tick)}
        quiet = [stage for stage, known in draws.items() if known is False]
        turns = [stage for stage, known in draws.items() if known is not False]
        waves = [[*quiet, turns[0]], *([turn] for turn in turns[1:])] if turns else [quiet]
        for wave in waves:
            before = self._states()
            yield wave
            if turns:
                if draws[wave[-1]] is None:
                    self._draws[keys[wave[-1]]] = self._changed(before)
            elif self._changed(before):  # a stage now draws random numbers, so test the stages of this wave again
                for stage in wave:
                    self._draws.pop(keys[stage], None)

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(each) for each in self._shared)]

    def _changed(self, before: Sequence[Tensor]) -> bool:
        return not all(map(torch.equal, before, self._states()))
