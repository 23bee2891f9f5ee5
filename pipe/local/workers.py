"""Threads that each run one stage: tasks come in by a queue, answers go out by another.

A thread starts with PyTorch's defaults, whatever its caller has set: whether gradients are recorded, autocast, the
default device, and the current streams of GPUs belong to threads. So a task carries its caller's (`Modes`).
"""

import contextvars
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from pipe.local.across import Ready, Streams, events_now, streams_now


@dataclass(frozen=True)
class Modes:
    """What a thread has set, to be set in another."""

    gradients: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]  # device types on which it is on
    default_device: torch.device
    streams: tuple[torch.cuda.Stream, ...]
    context: contextvars.Context

    @classmethod
    def of_this_thread(cls, value: Any, devices: Sequence[torch.device]) -> "Modes":
        """Look what is set here, for work on the value and on some devices."""
        types = sorted({"cpu", *(device.type for device in devices)})
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((each, torch.get_autocast_dtype(each)) for each in types if torch.is_autocast_enabled(each)),
            torch.get_default_device(),
            tuple(streams_now(value, *devices)),
            contextvars.copy_context(),
        )

    @contextmanager
    def set_here(self, device: torch.device) -> Iterator[None]:
        """Within it, this thread works as the other would, on a device."""
        for stream in self.streams:
            torch.cuda.set_stream(stream)  # makes its device the current one, too
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            for kind, dtype in self.autocast:
                # Casts are kept for all threads at once: whose gradients are summed in 16 bits would be up to chance.
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            if self.default_device != torch.get_default_device():
                stack.enter_context(self.default_device)
            yield


@dataclass
class Call:
    """One forward of a pipe, and where its answers go: what comes of one that failed, nobody reads."""

    modes: Modes
    answers: "SimpleQueue[Answer]" = field(default_factory=SimpleQueue)


@dataclass(frozen=True)
class Answer:
    """What came of a task: a value, and when GPUs have it; or an error."""

    stage: int
    microbatch: int
    value: Any = None
    ready: Ready = field(default_factory=dict)
    error: BaseException | None = None


@dataclass(frozen=True)
class Task:
    """One micro-batch through one stage."""

    call: Call
    stage: int
    microbatch: int
    layers: nn.Sequential
    value: Any
    ready: Ready

    def answer(self, streams: Streams) -> Answer:
        """Do it."""
        try:
            # A context runs in one thread at a time, and stages run at once.
            return self.call.modes.context.copy().run(self._run, streams)
        except BaseException as error:  # whatever it is, the caller is to have it, and this thread goes on
            return Answer(self.stage, self.microbatch, error=error)

    def _run(self, streams: Streams) -> Answer:
        with self.call.modes.set_here(streams.device):
            value = streams.fetch(self.value, self.ready)
            for layer in self.layers:
                value = layer(value)
            return Answer(self.stage, self.microbatch, value, events_now(value))


class Workers:
    """One thread a device, each with a queue of tasks of its own."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.inboxes: list[SimpleQueue[Task | None]] = [SimpleQueue() for _ in devices]
        self.threads = [
            threading.Thread(target=_work, args=(inbox, device), name=f"pipe stage {stage} on {device}", daemon=True)
            for stage, (inbox, device) in enumerate(zip(self.inboxes, devices, strict=True))
        ]
        for thread in self.threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """False in a fork of the process that started them: it has none of its threads."""
        return all(thread.is_alive() for thread in self.threads)

    def stop(self) -> None:
        """Let every thread end after the task it has; they are not waited for."""
        for inbox in self.inboxes:
            inbox.put(None)


def _work(inbox: "SimpleQueue[Task | None]", device: torch.device) -> None:
    """Be a worker."""
    streams = Streams(device)
    while (task := inbox.get()) is not None:
        task.call.answers.put(task.answer(streams))
        del task  # an idle worker holds no activation
