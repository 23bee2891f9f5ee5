"""Record the collectives of a user's class: their names, bytes, starts and waits.

All functions of `torch.distributed` call a method of `ProcessGroup`, and `wait` of the `Work` that it returns. Both
classes are patched, so it does not matter how the user's file imports the functions. Collectives that compiled code
starts (the reducer of torch's own DDP) do not pass through Python, and are not recorded.
"""

import functools
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch.distributed import ProcessGroup, Work

# The position of the argument with the data that this rank sends (or receives, for `recv`).
SENT: Final = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "broadcast", "reduce", "scatter", "send"), 0),
    **dict.fromkeys(("allgather", "_allgather_base", "allgather_coalesced", "all_gather_single", "gather"), 1),
    **dict.fromkeys(("allgather_into_tensor_coalesced", "all_gather_single_coalesced"), 1),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"), 1),
    **dict.fromkeys(("reduce_scatter_single", "reduce_scatter_single_coalesced"), 1),
    **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single"), 1),
    **dict.fromkeys(("recv", "recv_anysource"), 0),
}


@dataclass(frozen=True)
class TrafficEvent:
    """A recorded event: a gradient becomes ready, a collective starts, or a wait for a collective begins."""

    kind: Literal["ready", "start", "wait"]
    name: str
    size: int = 0  # bytes
    of: int = -1  # for a wait, the index of the start event


class Traffic:
    """A recorder of communication, active within `recording`. `events` are in order."""

    def __init__(self) -> None:
        self.events: list[TrafficEvent] = []
        self.on = False
        self.doing = ""  # the collective that this rank is currently in, for messages
        self._works: dict[int, tuple[Any, int]] = {}  # keeps each Work alive, so that ids are unique
        self._inside = False
        for name in SENT:
            if hasattr(ProcessGroup, name):
                setattr(ProcessGroup, name, self._call(name, getattr(ProcessGroup, name)))
        setattr(Work, "wait", self._wait(Work.wait))  # noqa: B010 - mypy knows it as a method

    def watch(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Record when the gradients of parameters are ready; call this before the user's class adds its hooks."""
        for name, parameter in named:
            if parameter.requires_grad:
                hook = functools.partial(self._ready, name)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @contextmanager
    def recording(self) -> Any:
        """Record all events within the block, starting with an empty list."""
        self.events, self._works, self.on = [], {}, True
        try:
            yield self
        finally:
            self.on = False

    def starts(self) -> list[TrafficEvent]:
        """Return the collectives that were recorded."""
        return [each for each in self.events if each.kind == "start"]

    def overlapping(self) -> int:
        """Count the collectives that overlapped with the computation of a later gradient."""
        found = 0
        for index, event in enumerate(self.events):
            if event.kind != "start":
                continue
            waits = [at for at, each in enumerate(self.events) if each.kind == "wait" and each.of == index]
            end = waits[0] if waits else len(self.events)
            found += any(each.kind == "ready" for each in self.events[index:end])
        return found

    def _ready(self, name: str, parameter: torch.Tensor) -> None:
        if self.on:
            self.events.append(TrafficEvent("ready", name))

    def _call(self, name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(group: Any, *args: Any, **options: Any) -> Any:
            if self._inside:  # called by another patched method
                return function(group, *args, **options)
            self.doing, self._inside = name, True
            if self.on:
                given = args[SENT[name]] if len(args) > SENT[name] else next(iter(options.values()), None)
                self.events.append(TrafficEvent("start", name, size_of(given)))
            at = len(self.events) - 1
            try:
                work = function(group, *args, **options)
            finally:
                self.doing, self._inside = "", False
            if self.on and work is not None:
                self._works[id(work)] = work, at
            return work

        return call

    def _wait(self, function: Any) -> Any:
        @functools.wraps(function)
        def wait(work: Any, *args: Any) -> Any:
            at = self._works.get(id(work), (None, -1))[1]
            if self.on and at >= 0:
                self.events.append(TrafficEvent("wait", "", of=at))
            self.doing = self.events[at].name if 0 <= at < len(self.events) else "a collective"
            try:
                return function(work, *args)
            finally:
                self.doing = ""

        return wait


def size_of(given: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(given, torch.Tensor):
        return given.numel() * given.element_size()
    return sum(map(size_of, given)) if isinstance(given, Sequence) and not isinstance(given, str) else 0
