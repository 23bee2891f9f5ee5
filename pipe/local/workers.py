"""Threads that each run one stage, with a queue for tasks and another one for results.

A new thread has PyTorch's defaults, not its caller's settings. Gradient recording, autocast, the default device, and
the current streams of GPUs are all per thread. So each task carries the settings of its caller (`Modes`).
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

from muster.pipe.buffers import Buffers
from muster.pipe.local.across import Ready, Streams, events_now, streams_now
from muster.pipe.local.recomputing import recomputed

AT_EXIT_S: Final = 30.0  # longest wait for running layers when the process exits


@dataclass(frozen=True)
class Modes:
    """A thread's settings, to be applied in another thread."""

    gradients: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]  # device types with autocast enabled, with their dtypes
    default_device: torch.device
    streams: tuple[torch.cuda.Stream, ...]
    context: contextvars.Context

    @classmethod
    def of_this_thread(cls, value: Any, devices: Sequence[torch.device]) -> "Modes":
        """Read this thread's settings, with its current streams on `devices` and on the devices of a value's tensors.

        Raises:
            RuntimeError: If a transform of torch.func or a trace is active, which does not apply to other threads.
        """
        _require_plain()
        types = sorted({"cpu", *(device.type for device in devices)} - {"meta"})  # the meta device has no autocast
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
        """Apply the settings to this thread within the block, for work on a device."""
        for stream in self.streams:
            torch.cuda.set_stream(stream)  # this also makes the stream's device current
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            for kind, dtype in self.autocast:
                # All threads share the cast cache, so timing would decide which gradients are summed in 16 bits.
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            if self.default_device != torch.get_default_device():
                stack.enter_context(self.default_device)
            yield


@dataclass
class PipeCall:
    """One forward of a pipe, with the queue of its results. After a failure, nobody reads the remaining results."""

    modes: Modes
    answers: "SimpleQueue[StageResult]" = field(default_factory=SimpleQueue)


@dataclass(frozen=True)
class StageResult:
    """The result of a task: an error, or a value with the GPU events that mark when it is ready."""

    stage: int
    microbatch: int
    value: Any = None
    ready: Ready = field(default_factory=dict)
    error: BaseException | None = None


@dataclass(frozen=True)
class StageTask:
    """The forward of one micro-batch through one stage."""

    call: PipeCall
    stage: int
    microbatch: int
    layers: nn.Sequential
    value: Any
    ready: Ready
    buffers: Buffers | None = None  # the buffers of the layers, if the backward recomputes the forward

    def answer(self, streams: Streams) -> StageResult:
        """Run the task and return its result."""
        try:
            # Stages run concurrently, but a context can be active in only one thread, so each task uses a copy.
            return self.call.modes.context.copy().run(self._run, streams)
        except BaseException as error:  # the caller raises the error; this thread continues
            return StageResult(self.stage, self.microbatch, error=error)

    def _run(self, streams: Streams) -> StageResult:
        with self.call.modes.set_here(streams.device):
            value = streams.fetch(self.value, self.ready)
            if self.buffers is not None and torch.is_grad_enabled():
                value = recomputed(self.layers, value, self.buffers)
            else:
                for layer in self.layers:
                    value = layer(value)
            return StageResult(self.stage, self.microbatch, value, events_now(value))


class StageWorker(threading.Thread):
    """A thread that runs one stage's tasks on a device, in the order of its queue."""

    def __init__(self, stage: int, device: torch.device) -> None:
        # A daemon, because at exit the interpreter would wait forever for an idle worker.
        super().__init__(name=f"pipe stage {stage} on {device}", daemon=True)
        self.device = device
        self.inbox: SimpleQueue[StageTask | None] = SimpleQueue()
        _WORKERS.add(self)

    def run(self) -> None:
        """Run tasks until `end` is called."""
        streams = Streams(self.device)
        while (task := self.inbox.get()) is not None:
            task.call.answers.put(task.answer(streams))
            del task  # so that an idle worker holds no activations

    def end(self) -> None:
        """Make the thread end after its pending tasks, without waiting for it."""
        self.inbox.put(None)


_WORKERS: Final[MutableSet[StageWorker]] = weakref.WeakSet()  # workers of all pipes


@atexit.register
def _end_all() -> None:
    """Wait for workers, because one that still runs when the interpreter exits would abort the process.

    Workers still run at exit if an error of one stage ends the program while other stages are computing.
    """
    workers, deadline = list(_WORKERS), time.monotonic() + AT_EXIT_S
    for each in workers:
        each.end()
    for each in workers:
        each.join(max(0.0, deadline - time.monotonic()))


class Workers:
    """The workers of a pipe, one per stage. Threads start on first use, and again if they have ended."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self.threads: list[StageWorker] = []
        self._starting = threading.Lock()
        self._end: Callable[[], object] = _nothing

    def inboxes(self) -> "list[SimpleQueue[StageTask | None]]":
        """Return the task queue of every stage. A worker returns one result for every task in its queue."""
        with self._starting:  # several threads may use one pipe
            # After a fork none of the parent's threads are alive.
            if not self.threads or not all(each.is_alive() for each in self.threads):
                self._end()
                threads = [StageWorker(stage, device) for stage, device in enumerate(self.devices)]
                for each in threads:
                    each.start()
                self._end = weakref.finalize(self, _end, threads)
                self.threads = threads
            return [each.inbox for each in self.threads]

    def close(self) -> None:
        """End the workers and wait for them."""
        with self._starting:
            threads, self.threads = self.threads, []
            self._end()
        for each in threads:
            each.join()

    def __reduce__(self) -> Any:
        """Copy and pickle without threads; the copy starts its own."""
        return Workers, (self.devices,)


def _end(threads: Sequence[StageWorker]) -> None:
    for each in threads:
        each.end()


def _nothing() -> None:
    pass


def _require_plain() -> None:
    """Raise an error if a transform or trace is active, because it would not apply to the threads of the stages."""
    what = None
    if torch._C._functorch.peek_interpreter_stack() is not None:
        what = "a transform of torch.func (such as grad, jvp or vmap)"
    elif torch._C._get_tracing_state() is not None or torch.compiler.is_exporting():
        what = "tracing"
    if what is not None:
        raise RuntimeError(
            f"Pipe: {what} applies only to its own thread, but stages run on others; apply it to the pipe's .module"
        )
