"""Collectives beside a computation: how much longer each takes, and what a collective costs the host."""

from statistics import median
from time import perf_counter, process_time
from typing import Final

import torch
import torch.distributed as dist

from muster.jobs.train.timing.passes import LEAST_PASSES, TimedModel, passes_of, replaying, seconds_of

CALLS: Final = 30  # all-reduces of a round
MESSAGES: Final = (1 << 10, 1 << 20)  # bytes
FEW_BYTES: Final = 4 << 10


def beside_cpu(subject: TimedModel, size: int) -> dict[str, float]:
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


def beside_gpu(subject: TimedModel, size: int) -> dict[str, float]:
    """Return the factor by which NCCL's kernels slow passes beside them, and the host's seconds of a call.

    Passes are replayed if they can be recorded, so that the host does not hide the slowdown.
    """
    try:
        passes = replaying(*passes_of(subject, size))
    except RuntimeError:
        forward, backward = passes_of(subject, size)

        def passes() -> None:
            forward()
            backward()

    data, stream = torch.ones(16 << 20, device=subject.device), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    took: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(4 * LEAST_PASSES):
        beside = bool(turn % 2)
        if beside:
            with torch.cuda.stream(stream):
                for _ in range(CALLS):
                    dist.all_reduce(data)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        passes()
        end.record()
        end.synchronize()
        took[beside].append(start.elapsed_time(end))
        torch.cuda.synchronize(subject.device)
    few = torch.ones(FEW_BYTES // 4, device=subject.device)
    calls = [seconds_of(lambda: dist.all_reduce(few)) for _ in range(CALLS)]
    launches = [seconds_of(passes) for _ in range(LEAST_PASSES)]
    torch.cuda.synchronize(subject.device)
    slowed = median(took[True][1:]) / median(took[False][1:])
    return {"slowed": max(slowed, 1.0), "call_s": median(calls), "launch_s": median(launches)}
