"""Measure what `muster advise` needs of a job's model on this machine, in a separate process with the ranks' Python.

    stdin     {"job": the job as serialized by `jobs/spec/plain.py`, "ranks": n, "samples": [...], "variants": {...}}
    stdout    one line: the record that `collectives_bench/cost/advice/measured.py` reads, or {"refused": message}

`ranks` processes are forked, as many as the job has ranks on this machine. A *round* times passes of one size in the
first k of them at the same time, because ranks that share cores, memory and caches slow each other down:

    k = 1      process 0   F B F B F B
    k = 2      process 0   F B F B F B      process 1   F B F B F B
"""

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.sections import replaced
from muster.jobs.spec.plain import plain_job
from muster.jobs.train.data import open_data
from muster.jobs.train.data.loading import move_inputs
from muster.jobs.train.models import model_of
from muster.jobs.train.models.stack import LayerStack
from muster.jobs.train.numerics import Numerics, numerics_of
from muster.jobs.train.timing.device import synchronize
from muster.pipe.layer_times import layer_times

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings

ROUND_S: Final = 0.4
LEAST_PASSES: Final = 3
MOST_PASSES: Final = 40
LIMIT_S: Final = 240.0
CALLS: Final = 30  # all-reduces of a round
MESSAGES: Final = (1 << 10, 1 << 20)  # bytes
GPUS: Final = "cuda"


@dataclass
class TimedModel:
    """A model on its device, with an optimizer and batches."""

    settings: "TrainSettings"
    numerics: Numerics
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], tuple[Tensor, Tensor]]

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.numerics.device


def main() -> int:
    """Measure the job on standard input."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with answer:
        answer.write(json.dumps(_measured(json.load(sys.stdin))))
    return 0


def _measured(asked: Mapping[str, Any]) -> dict[str, Any]:
    settings = cast("TrainSettings", plain_job(asked["job"]).settings)
    try:
        return measure(settings, asked["ranks"], asked["samples"], asked["variants"], asked["threads"])
    except RefusedError as error:
        return {"refused": str(error)}


def measure(
    settings: "TrainSettings",
    ranks: int,
    samples: Sequence[int],
    variants: Mapping[str, Mapping[str, Any]],
    threads: int = 1,
) -> dict[str, Any]:
    """Measure a job's model on this machine; return the record of process 0.

    `samples` are the sizes of passes. `variants` are changes of the job's settings, by name; each is timed once.

    Raises:
        RefusedError: if the model or its data cannot be built, or a process fails.
    """
    on_gpus = settings.device == GPUS or (settings.device == "auto" and _gpus() > 0)
    count = min(ranks, _gpus()) if on_gpus else ranks
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(max(count, 1)), context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        work = (settings, samples, variants, threads, on_gpus)
        processes = [
            context.Process(target=_work, args=(rank, count, barrier, queue, folder, work), daemon=True)
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(LIMIT_S)
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
        found: dict[str, Any] = {"refused": "train: timing the model failed; see the output above"}
        while not queue.empty():
            found = queue.get()
            if "refused" in found:
                break
    if "refused" in found:
        raise RefusedError(found["refused"])
    return found


def _gpus() -> int:
    """Count the GPUs without starting CUDA, which would break processes that are forked later."""
    return torch.cuda.device_count() if torch.backends.cuda.is_built() else 0  # type: ignore[no-untyped-call]


def _work(rank: int, count: int, barrier: Any, queue: Any, folder: str, work: tuple[Any, ...]) -> None:
    settings, samples, variants, threads, on_gpus = work
    torch.set_num_threads(threads)
    try:
        device = torch.device(GPUS, rank) if on_gpus else torch.device("cpu")
        if on_gpus:
            torch.cuda.set_device(device)
        record = _Worker(rank, count, barrier, settings, device).record(samples, variants, folder)
    except RefusedError as error:
        record = {"refused": str(error)}
        barrier.abort()
    if rank == 0 or "refused" in record:
        queue.put(record)


class _Worker:
    """One process of the measurement. All processes run the same rounds; a round starts and ends at a barrier."""

    def __init__(self, rank: int, count: int, barrier: Any, settings: "TrainSettings", device: torch.device) -> None:
        self.rank = rank
        self.count = count
        self.barrier = barrier
        self.settings = settings
        self.device = device
        self.spread = 0.0  # the largest relative half-width of a round's middle half

    def record(self, samples: Sequence[int], variants: Mapping[str, Mapping[str, Any]], folder: str) -> dict[str, Any]:
        """Run all rounds; return what this process measured."""
        subject = subject_of(self.settings, self.device)
        cores = len(os.sched_getaffinity(0))
        together = sorted({1, min(cores, self.count), self.count})
        passes, updates = [], []
        for size in samples:  # the first passes of a process are slow
            self._round(self.count, *passes_of(subject, size))
        for active in together:
            for size in samples:
                forward_s, backward_s = self._round(active, *passes_of(subject, size))
                passes.append({"samples": size, "active": active, "forward_s": forward_s, "backward_s": backward_s})
            updates.append({"active": active, "seconds": self._round(active, updating(subject))[0]})
        whole = subject.batch(samples[0])
        return {
            "model": self.settings.model.title,
            "device": self.device.type,
            "gpu": torch.cuda.get_device_name(self.device) if self.device.type == GPUS else "",
            "cores": cores,
            "ranks": self.count,
            "passes": passes,
            "updates": updates,
            "layers": self._alone(lambda: layers_of(subject, whole[0])) or [],
            "data_s": self._alone(lambda: _loading_s(subject, samples[0])) or 0.0,
            "host": self._alone(lambda: list(host_s(subject, samples[0]))) or [0.0, 0.0, 0.0],
            "variants": {name: self._variant(changes, samples[0]) for name, changes in variants.items()},
            "spread": self.spread,
            "messages": self._messages(subject, samples[0], folder),
        }

    def _round(self, active: int, *parts: Callable[[], None]) -> list[float]:
        """Time the parts, one after the other, in the first `active` processes; return a median for each part."""
        self.barrier.wait(LIMIT_S)
        took: list[list[float]] = [[] for _ in parts]
        if self.rank < active:
            until, done = perf_counter() + ROUND_S, -1
            while done < LEAST_PASSES or (done < MOST_PASSES and perf_counter() < until):
                for part, times in zip(parts, took, strict=True):
                    begin = perf_counter()
                    part()
                    synchronize(self.device)
                    times.append(perf_counter() - begin)
                done += 1
        self.barrier.wait(LIMIT_S)
        middles = [median(times[1:]) if times else 0.0 for times in took]
        for times, middle in zip(took, middles, strict=True):
            if len(times) > LEAST_PASSES and middle:
                low, _, high = quantiles(times[1:], n=4)
                self.spread = max(self.spread, (high - low) / 2 / middle / len(times) ** 0.5)
        return middles

    def _alone(self, work: Callable[[], Any]) -> Any:
        self.barrier.wait(LIMIT_S)
        found = work() if self.rank == 0 else None
        self.barrier.wait(LIMIT_S)
        return found

    def _variant(self, changes: Mapping[str, Any], size: int) -> list[float] | None:
        """Time passes with other settings; None if the machine does not support them."""
        recorded = dict(changes)
        graphed = recorded.pop("cuda_graph", False)
        try:
            subject = subject_of(replaced(self.settings, **recorded), self.device)
            if graphed:
                return self._round(self.count, replaying(subject, size))
            return self._round(self.count, *passes_of(subject, size))
        except (RefusedError, RuntimeError):
            return None

    def _messages(self, subject: TimedModel, size: int, folder: str) -> dict[str, float]:
        """Time small and large all-reduces over the loopback, with idle cores and beside a computation."""
        if self.count < 2:
            return {}
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "nccl" if self.device.type == GPUS else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=self.rank, world_size=self.count)
        record = _beside_gpu(subject, size) if backend == "nccl" else _beside_cpu(subject, size)
        self.barrier.wait(LIMIT_S)
        dist.destroy_process_group()
        return record


def subject_of(settings: "TrainSettings", device: torch.device) -> TimedModel:
    """Build the model, the optimizer and the data of a job, as its ranks do."""
    data, numerics = open_data(settings), numerics_of(settings, device)
    model = numerics.place(model_of(settings, vocabulary=data.vocabulary))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def batch(size: int) -> tuple[Tensor, Tensor]:
        inputs, targets = data.train_batch(torch.arange(size) % data.train_samples, 0)
        return move_inputs(inputs, device, numerics.inputs), targets.to(device)

    return TimedModel(settings, numerics, model, numerics.optimizer(parameters, settings.optimizer), batch)


def passes_of(subject: TimedModel, size: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return functions that run a forward of `size` samples, and the backward of the last forward."""
    inputs, targets = subject.batch(size)
    losses: list[Tensor] = []

    def forward() -> None:
        losses[:] = [subject.numerics.loss(subject.model, inputs, targets)]

    def backward() -> None:
        losses.pop().backward()  # type: ignore[no-untyped-call]

    return forward, backward


def updating(subject: TimedModel) -> Callable[[], None]:
    """Return a function that runs the optimizer's step, and the release of the gradients that follows."""
    for part in passes_of(subject, 1):
        part()
    gradients = [parameter.grad for parameter in subject.model.parameters()]

    def update() -> None:
        subject.optimizer.step()
        subject.optimizer.zero_grad(set_to_none=True)
        for parameter, gradient in zip(subject.model.parameters(), gradients, strict=True):
            parameter.grad = gradient

    return update


def layers_of(subject: TimedModel, inputs: Tensor) -> list[dict[str, Any]]:
    """Return the name, forward and backward seconds of every layer; none for a model that is no stack of layers."""
    if not isinstance(subject.model, LayerStack) or subject.numerics.autocast is not None:
        return []
    names = [name for name, _ in subject.model.named_children()]
    return [
        {"name": name, "forward_s": forward_s, "backward_s": backward_s}
        for name, (forward_s, backward_s) in zip(names, layer_times(subject.model, inputs), strict=True)
    ]


def host_s(subject: TimedModel, size: int) -> tuple[float, float, float]:
    """Return the seconds in which the host enqueues a forward, a backward and an update on a GPU; 0 on CPUs."""
    if subject.device.type != GPUS:
        return 0.0, 0.0, 0.0
    parts, took = (*passes_of(subject, size), updating(subject)), list[list[float]]()
    for _ in range(MOST_PASSES // 4):
        took.append([])
        for part in parts:
            synchronize(subject.device)
            begin = perf_counter()
            part()
            took[-1].append(perf_counter() - begin)
    forward, backward, update = (median(times) for times in zip(*took[1:], strict=True))
    return forward, backward, update


def replaying(subject: TimedModel, size: int) -> Callable[[], None]:
    """Return a function that replays a forward and a backward, recorded as a CUDA graph."""
    forward, backward = passes_of(subject, size)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(LEAST_PASSES):
            forward()
            backward()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
        backward()
    return graph.replay


def _loading_s(subject: TimedModel, size: int) -> float:
    took = []
    for _ in range(LEAST_PASSES):
        begin = perf_counter()
        subject.batch(size)
        took.append(perf_counter() - begin)
    return median(took)


def _beside_cpu(subject: TimedModel, size: int) -> dict[str, float]:
    """Time gloo's all-reduces with idle cores, then while a backward runs in a thread of every process."""
    from threading import Event, Thread

    found: dict[str, float] = {}
    for nbytes in MESSAGES:
        used, begin = process_time(), perf_counter()
        found[f"idle_{nbytes}_s"] = _reducing_s(nbytes)
        if nbytes == MESSAGES[-1]:
            found["cpu_s_per_byte"] = (process_time() - used) / (CALLS + 1) / nbytes
            found["wall_s"] = perf_counter() - begin
    forward, backward = passes_of(subject, size)
    over = Event()

    def compute() -> None:
        while not over.is_set():
            forward()
            backward()

    thread = Thread(target=compute)
    thread.start()
    for nbytes in MESSAGES:
        found[f"busy_{nbytes}_s"] = _reducing_s(nbytes)
    over.set()
    thread.join()
    return found


def _reducing_s(nbytes: int) -> float:
    """Return the mean seconds of an all-reduce. The mean counts, because a rank that is not scheduled delays a step."""
    data = torch.ones(nbytes // 4)
    dist.all_reduce(data)
    begin = perf_counter()
    for _ in range(CALLS):
        dist.all_reduce(data)
    return (perf_counter() - begin) / CALLS


def _beside_gpu(subject: TimedModel, size: int) -> dict[str, float]:
    """Return the factor by which NCCL's kernels slow a backward that runs at the same time."""
    forward, backward = passes_of(subject, size)
    data, stream = torch.ones(16 << 20, device=subject.device), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    took: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(4 * LEAST_PASSES):
        beside = bool(turn % 2)
        forward()
        synchronize(subject.device)
        if beside:
            with torch.cuda.stream(stream):
                for _ in range(CALLS):
                    dist.all_reduce(data)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        backward()
        end.record()
        end.synchronize()
        took[beside].append(start.elapsed_time(end))
        torch.cuda.synchronize(subject.device)
    return {"slowed": max(median(took[True][1:]) / median(took[False][1:]), 1.0)}


if __name__ == "__main__":
    sys.exit(main())
