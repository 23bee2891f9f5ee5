"""Let only one stage of a process draw random numbers at a time, so that results do not depend on thread timing.

    tick 3    stage 0: none     ──┐         a wave: at most one of its stages draws
              stage 1: dropout  ──┴──►
              stage 2: dropout       ────►   the next wave

All threads draw from one generator on CPUs, and stages on one GPU share that GPU's. Whether a stage draws is detected
from the generators' states before and after a wave. A stage not seen before runs only with stages known not to draw.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

Key = tuple[int, tuple[tuple[type, bool], ...]]  # stage number; type and training mode of each module


class Turns:
    """Records which stages of a pipe draw random numbers."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        stages = Counter(each for each in devices if each.type == "cuda")
        self._shared = [device for device, count in stages.items() if count > 1]
        self._draws: dict[Key, bool] = {}

    def keys(self, stages: Sequence[nn.Module]) -> list[Key]:
        """Return keys for the current state of the stages."""
        return [
            (number, tuple((type(each), each.training) for each in stage.modules()))
            for number, stage in enumerate(stages)
        ]

    def waves(self, keys: Sequence[Key], tick: Iterable[int]) -> Iterator[list[int]]:
        """Yield groups of a tick's stages that may run together. The caller must wait for a group before the next."""
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
            elif self._changed(before):  # a stage has begun to draw: treat this wave's stages as new
                for stage in wave:
                    self._draws.pop(keys[stage], None)

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(each) for each in self._shared)]

    def _changed(self, before: Sequence[Tensor]) -> bool:
        return not all(map(torch.equal, before, self._states()))
