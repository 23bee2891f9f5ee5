"""Threads that each run one stage: tasks come in by a queue, answers go out by another.

A thread starts with PyTorch's defaults, whatever its caller has set: whether gradients are recorded, autocast, the
default device, and the current streams of GPUs belong to threads. So a task carries its caller's (`Modes`).
"""

import atexit
import contextvars
import threading
import time
import weakref
from collections.abc import Callable, Iterator, MutableSet, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Final

import torch
from torch import nn

from muster.pipe.local.across import Ready, Streams, events_now, streams_now

AT_EXIT_S: Final = 30.0  # how long the end of the process waits for layers that are still at work


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
        """Look what is set here, for work on the value and on some devices.

        Raises:
            RuntimeError: this thread transforms or traces what it computes, which other threads would not.
        """
        _require_plain()
        types = sorted({"cpu", *(device.type for device in devices)} - {"meta"})  # on meta, nothing is cast
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


class Worker(threading.Thread):
    """Runs one stage's tasks on a device, in the order of its queue."""

    def __init__(self, stage: int, device: torch.device) -> None:
        # A daemon: another thread that waits for the end of all others would wait for an idle worker, too.
        super().__init__(name=f"pipe stage {stage} on {device}", daemon=True)
        self.device = device
        self.inbox: SimpleQueue[Task | None] = SimpleQueue()
        _WORKERS.add(self)

    def run(self) -> None:
        """Be a worker."""
        streams = Streams(self.device)
        while (task := self.inbox.get()) is not None:
            task.call.answers.put(task.answer(streams))
            del task  # an idle worker holds no activation

    def end(self) -> None:
        """Let it end after the tasks it has; nobody waits for that here."""
        self.inbox.put(None)


_WORKERS: Final[MutableSet[Worker]] = weakref.WeakSet()  # of all pipes


@atexit.register
def _end_all() -> None:
    """Wait for workers: one that is at work when the interpreter ends makes the process abort, whatever it exits with.

    An error of a stage is raised while other stages are at work, and may end the program.
    """
    workers, deadline = list(_WORKERS), time.monotonic() + AT_EXIT_S
    for each in workers:
        each.end()
    for each in workers:
        each.join(max(0.0, deadline - time.monotonic()))


class Workers:
    """The workers of a pipe, one a device: started when they are first asked for, and again where they have ended."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self.threads: list[Worker] = []
        self._starting = threading.Lock()
        self._end: Callable[[], object] = _nothing

    def inboxes(self) -> "list[SimpleQueue[Task | None]]":
        """Return every stage's queue of tasks; whoever puts one there is answered."""
        with self._starting:  # several threads may use one pipe
            # None is alive in a fork of the process that started them.
            if not self.threads or not all(each.is_alive() for each in self.threads):
                self._end()
                threads = [Worker(stage, device) for stage, device in enumerate(self.devices)]
                for each in threads:
                    each.start()
                self._end = weakref.finalize(self, _end, threads)
                self.threads = threads
            return [each.inbox for each in self.threads]

    def close(self) -> None:
        """End them, and wait for that."""
        with self._starting:
            threads, self.threads = self.threads, []
            self._end()
        for each in threads:
            each.join()

    def __reduce__(self) -> Any:
        """Copies and pickles start their own."""
        return Workers, (self.devices,)


def _end(threads: Sequence[Worker]) -> None:
    for each in threads:
        each.end()


def _nothing() -> None:
    pass


def _require_plain() -> None:
    """Check that no transform or trace is under way: it belongs to this thread, and others' work would be left out."""
    what = None
    if torch._C._functorch.peek_interpreter_stack() is not None:
        what = "a transform of torch.func, as grad, jvp and vmap,"
    elif torch._C._get_tracing_state() is not None or torch.compiler.is_exporting():
        what = "tracing"
    if what is not None:
        raise RuntimeError(
            f"Pipe: {what} sees what its own thread computes, and stages run on others: give it the pipe's .module"
        )
