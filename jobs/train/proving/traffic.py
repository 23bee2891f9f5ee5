"""Record the collectives of a user's class: their names, bytes, and when they start and are waited for.

All functions of `torch.distributed` call a method of `ProcessGroup`, and `wait` of the `Work` that it returns. Both
classes are patched, so it does not matter how the user's file imports or calls them. Collectives that compiled code
starts (the reducer of torch's own DDP) do not pass through Python, and are not seen.
"""

import functools
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch.distributed import ProcessGroup, Work

# The argument with the data that this rank sends (or, for a receiver, gets).
SENT: Final = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "broadcast", "reduce", "scatter", "send"), 0),
    **dict.fromkeys(("allgather", "_allgather_base", "allgather_coalesced", "all_gather_single", "gather"), 1),
    **dict.fromkeys(("allgather_into_tensor_coalesced", "all_gather_single_coalesced"), 1),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"), 1),
    **dict.fromkeys(("reduce_scatter_single", "reduce_scatter_single_coalesced"), 1),
    **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single"), 1),
    **dict.fromkeys(("recv", "recv_anysource"), 0),
}
TO_ONE: Final = ("send", "recv", "recv_anysource")


@dataclass(frozen=True)
class Event:
    """A recorded event: a gradient is ready, a collective starts, a collective is waited for."""

    kind: Literal["ready", "start", "wait"]
    name: str
    size: int = 0  # bytes
    of: int = -1  # the start that a wait belongs to


class Traffic:
    """The events recorded since `begin`, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.on = False
        self.doing = ""  # the current call of this rank, for messages
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

    def starts(self) -> list[Event]:
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
            self.events.append(Event("ready", name))

    def _call(self, name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(group: Any, *args: Any, **options: Any) -> Any:
            if self._inside:  # a method called by another one
                return function(group, *args, **options)
            self.doing, self._inside = name, True
            if self.on:
                given = args[SENT[name]] if len(args) > SENT[name] else next(iter(options.values()), None)
                self.events.append(Event("start", name, size_of(given)))
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
                self.events.append(Event("wait", "", of=at))
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
