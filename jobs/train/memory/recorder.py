"""Record a rank's memory by purpose: before the model is built, after init, and around the first optimizer steps.

    baseline     model, wrapper, optimizer  │ init │  forward  backward  │ before_step │ step │ after_step │ ...  │ end
    heap                                          sampled ^      ^ at the first gradient, and at the largest

The recorder is active in every run. It writes eight rows, each in a few milliseconds at most, and costs nothing after
the third step, when its hooks are removed. On CPUs the heap is sampled twice per backward, near its peaks: when the
last parameter's gradient arrives and all activations still exist, and when the largest gradient arrives. If a row
cannot be written, recording ends but training continues.
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

# most heap samples per step: a pipeline is full after a few micro-batches, and walking the heap takes time
MOST_SAMPLES: Final = 32
STEPS: Final = 3  # recorded steps: the first does all lazy setup, and in the second PyTorch rebuilds its buckets


class MemoryRecorder:
    """One rank's memory record, started before its model is built; a context manager around training."""

    def __init__(self, path: Path, device: torch.device, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.device = device
        self.steps = 0
        self.failed = False
        self._peaks: dict[str, int] = {}
        self._engine: Engine | None = None
        self._handles: list[RemovableHandle] = []
        resident.give_back()  # return free memory now, so that it does not count as freed later
        gauge.since(device)
        self._used_before = gauge.in_use() if device.type == "cpu" else None
        self._used: int | None = None  # the largest heap in use since the previous point
        self._samples = 0
        self._append({"point": BASELINE, **facts, "now": gauge.now(device)})

    def watch(self, engine: "Engine") -> None:
        """Record the memory before the first step, and register hooks for the steps."""
        self._engine = engine
        resident.give_back()  # free memory of discarded layers (other pipeline stages), so that no step counts it
        self._point(INIT)
        self._handles = [
            engine.optimizer.register_step_pre_hook(self._before),
            engine.optimizer.register_step_post_hook(self._after),
        ]
        if self._used_before is not None:
            self._handles += [_on_gradient(each, self._sample_heap) for each in _sampled_parameters(engine.module)]

    def __enter__(self) -> "MemoryRecorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove_hooks()
        self._since()
        graphs = 0 if self._engine is None else self._engine.graph_bytes
        more = {"graphs": graphs} if graphs else {}
        self._append({"point": END, "now": gauge.now(self.device), "peak": self._peaks, **more})
        self._engine = None

    def _before(self, *_: object) -> None:
        self.steps += 1
        self._point(BEFORE, step=self.steps)

    def _after(self, *_: object) -> None:
        if self.steps == STEPS:
            self._remove_hooks()
            resident.give_back()  # free heap blocks, so that this row shows only the memory needed between steps
        self._point(AFTER, step=self.steps)

    def _sample_heap(self, _: Tensor) -> None:
        self._samples += 1
        if self._samples > MOST_SAMPLES:
            return
        used = gauge.in_use()
        assert used is not None
        assert self._used_before is not None
        self._used = max(used - self._used_before, self._used or 0)

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _point(self, name: str, **more: Any) -> None:
        assert self._engine is not None
        held = bytes_by_kind(self._engine.held_tensors())
        used = {} if self._used is None else {"used": self._used}
        self._used, self._samples = None, 0
        now, peak = gauge.now(self.device), self._since()
        self._append({"point": name, **more, "held": held, "now": now, "peak": peak, **used})

    def _since(self) -> dict[str, int]:
        """Return the peaks since the previous point, and include them in the overall peaks."""
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
            warn(f"{error}; memory of this rank is no longer recorded")


def _sampled_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the last trainable parameter and the largest. A backward's memory peaks when their gradients arrive."""
    learning = [each for each in module.parameters() if each.requires_grad]
    found = [*learning[-1:], *sorted(learning, key=Tensor.numel)[-1:]]
    return list({id(each): each for each in found}.values())


def _on_gradient(parameter: nn.Parameter, call: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
    return handle
