"""Records what a rank's memory is for: before anything is made, after init, and around the first optimizer steps.

    baseline     model, wrapper, optimizer  │ init │  forward  backward  │ before_step │ step │ after_step │ ...  │ end
    heap                                            asked ^      ^ when the last gradient comes, and the largest

It is on in every run: eight rows in all, each some milliseconds at most, and nothing after the third step, when its
hooks are taken off again. On CPUs the heap is asked what is in use at the two moments of every backward at which it is
near its most: when all activations are there, and when the largest gradient is. A disk that does not take a row ends
the record and not the training.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from muster.jobs.basics.errors import MusterError
from muster.jobs.basics.files import append_line
from muster.jobs.basics.terminal import warn
from muster.jobs.machine import resident
from muster.jobs.runfolder.memory_rows import AFTER, BASELINE, BEFORE, END, INIT
from muster.jobs.train.memory import gauge
from muster.jobs.train.memory.held import bytes_by_kind

if TYPE_CHECKING:
    from muster.jobs.train.engine import Engine

MOST_ASKED: Final = 32  # times a step: a schedule is full after a few micro-batches, and a walk of the heap costs time
STEPS: Final = 3  # the first makes what is made lazily, buckets of PyTorch's are made anew in the second


class MemoryRecorder:
    """One rank's record, from before its model is made; as a context, around the training."""

    def __init__(self, path: Path, device: torch.device, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.device = device
        self.steps = 0
        self.failed = False
        self._peaks: dict[str, int] = {}
        self._engine: Engine | None = None
        self._handles: list[RemovableHandle] = []
        resident.give_back()  # what is free already must not be taken for what is given back later
        gauge.since(device)
        self._used_before = gauge.in_use() if device.type == "cpu" else None
        self._used: int | None = None  # the most since the point before
        self._asked = 0
        self._append({"point": BASELINE, **facts, "now": gauge.now(device)})

    def watch(self, engine: "Engine") -> None:
        """Write what is there before the first step, and watch the optimizer."""
        self._engine = engine
        resident.give_back()  # a whole model of which a stage is left: steps are to show what they need themselves
        self._point(INIT)
        self._handles = [
            engine.optimizer.register_step_pre_hook(self._before),
            engine.optimizer.register_step_post_hook(self._after),
        ]
        if self._used_before is not None:
            self._handles += [_on_gradient(each, self._ask_heap) for each in _telling(engine.module)]

    def __enter__(self) -> "MemoryRecorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._let_go()
        self._since()
        self._append({"point": END, "now": gauge.now(self.device), "peak": self._peaks})
        self._engine = None

    def _before(self, *_: object) -> None:
        self.steps += 1
        self._point(BEFORE, step=self.steps)

    def _after(self, *_: object) -> None:
        if self.steps == STEPS:
            self._let_go()
            resident.give_back()  # once, for what is there between two steps: not what they have left to the allocator
        self._point(AFTER, step=self.steps)

    def _ask_heap(self, _: Tensor) -> None:
        self._asked += 1
        if self._asked > MOST_ASKED:
            return
        used = gauge.in_use()
        assert used is not None
        assert self._used_before is not None
        self._used = max(used - self._used_before, self._used or 0)

    def _let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _point(self, name: str, **more: Any) -> None:
        assert self._engine is not None
        held = bytes_by_kind(self._engine.held_tensors())
        used = {} if self._used is None else {"used": self._used}
        self._used, self._asked = None, 0
        now, peak = gauge.now(self.device), self._since()
        self._append({"point": name, **more, "held": held, "now": now, "peak": peak, **used})

    def _since(self) -> dict[str, int]:
        """Return the peaks since the point before, which count for all of the run."""
        found = gauge.since(self.device)
        self._peaks = {name: max(value, self._peaks.get(name, 0)) for name, value in found.items()}
        return found

    def _append(self, row: dict[str, Any]) -> None:
        if self.failed:
            return
        try:
            append_line(self.path, {**row, "time": round(time.time(), 6)})
        except MusterError as error:
            self.failed = True
            warn(f"{error}; nothing more is written about this rank's memory")


def _telling(module: nn.Module) -> list[nn.Parameter]:
    """Return the last parameter that learns, and the largest: with their gradients most of a backward is there."""
    learning = [each for each in module.parameters() if each.requires_grad]
    found = [*learning[-1:], *sorted(learning, key=Tensor.numel)[-1:]]
    return list({id(each): each for each in found}.values())


def _on_gradient(parameter: nn.Parameter, call: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
    return handle
