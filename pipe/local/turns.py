"""Stages of one process that draw random numbers take turns, so that draws do not depend on which thread comes first.

    tick 3    stage 0: no draws ──┐         a wave: at most one of its stages draws
              stage 1: dropout  ──┴──►
              stage 2: dropout       ────►   the next wave

All threads draw from one generator on CPUs, and those of one GPU from that GPU's. Who draws is seen by the generators'
states before and after a wave: a stage that is new is alone with those that are known not to draw.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

Key = tuple[int, tuple[tuple[type, bool], ...]]  # a stage, its modules' types, and which of them are in training


class Turns:
    """Who of a pipe's stages draws."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        stages = Counter(each for each in devices if each.type == "cuda")
        self._shared = [device for device, count in stages.items() if count > 1]
        self._draws: dict[Key, bool] = {}

    def keys(self, stages: Sequence[nn.Module]) -> list[Key]:
        """Say what the stages are like now."""
        return [
            (number, tuple((type(each), each.training) for each in stage.modules()))
            for number, stage in enumerate(stages)
        ]

    def waves(self, keys: Sequence[Key], tick: Iterable[int]) -> Iterator[list[int]]:
        """Yield the stages of a tick that may run at once; whoever asks for the next has waited for them."""
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
            elif self._changed(before):  # somebody has begun to draw: from the next tick on it is looked at anew
                for stage in wave:
                    self._draws.pop(keys[stage], None)

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(each) for each in self._shared)]

    def _changed(self, before: Sequence[Tensor]) -> bool:
        return not all(map(torch.equal, before, self._states()))
