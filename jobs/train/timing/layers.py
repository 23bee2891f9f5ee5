"""Measure what `muster advise` needs of a job's model on this machine, in a separate process with the ranks' Python.

    stdin     {"job": the job as serialized by `jobs/spec/plain.py`, "ranks": n, "samples": [...], "variants": {...}}
    stdout    one line: the record that `collectives_bench/cost/advice/measured.py` reads, or {"refused": message}

`ranks` processes are forked, as many as the job has ranks on this machine. A *round* times passes of one size in the
first k of them at the same time, because ranks that share cores, memory and caches slow each other down:

    k = 1      process 0   F B F B F B
    k = 2      process 0   F B F B F B      process 1   F B F B F B

All rounds are run in `TURNS` turns. How far the turns differ is the error of the measurement. On GPUs, passes are also
recorded as CUDA graphs and replayed, because a recorded step does not wait for the host.
"""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.distributed as dist

from muster.jobs.basics.answering import answer
from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.sections import replaced
from muster.jobs.spec.plain import plain_job
from muster.jobs.train.timing.beside import beside_cpu, beside_gpu
from muster.jobs.train.timing.device import synchronize
from muster.jobs.train.timing.passes import (
    GPUS,
    LEAST_PASSES,
    MOST_PASSES,
    Parts,
    TimedModel,
    accumulating_s,
    fits,
    halves_of,
    host_s,
    layers_of,
    loading_s,
    passes_of,
    recorded_passes,
    replaying,
    subject_of,
    updating,
)
from muster.jobs.train.timing.steps import rows_of, steps_of

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings

ROUND_S: Final = 0.25
TURNS: Final = 2
LIMIT_S: Final = 240.0


def main() -> int:
    """Measure the job on standard input."""
    return answer(_measured)


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
        self.doubts: list[float] = []  # of every measured time: the relative half of the turns' difference

    def record(self, samples: Sequence[int], variants: Mapping[str, Mapping[str, Any]], folder: str) -> dict[str, Any]:
        """Run all rounds; return what this process measured."""
        subject = subject_of(self.settings, self.device)
        samples = [size for size in samples if fits(subject, size)] or samples[:1]
        cores, on_gpu = len(os.sched_getaffinity(0)), self.device.type == GPUS
        together = [self.count] if on_gpu else sorted({1, min(cores, self.count), self.count})
        rounds: dict[tuple[int, int], Parts] = {
            (active, size): passes_of(subject, size) for active in together for size in samples
        }
        rounds |= {(active, 0): (updating(subject),) for active in together}
        took = self._in_turns(rounds)
        replays = self._in_turns(recorded_passes(subject, samples, self.count)) if on_gpu else {}
        whole = subject.batch(samples[0])
        return {
            "model": self.settings.model.title,
            "device": self.device.type,
            "gpu": torch.cuda.get_device_name(self.device) if on_gpu else "",
            "cores": cores,
            "ranks": self.count,
            "passes": [
                {"samples": size, "active": active, "forward_s": pair[0], "backward_s": pair[1]}
                for (active, size), pair in took.items()
                if size
            ],
            "updates": [{"active": active, "seconds": took[active, 0][0]} for active in together],
            "replays": [
                {"samples": size, "active": active, "forward_s": part_s, "backward_s": max(both_s - part_s, 0.0)}
                for (active, size), (part_s, both_s) in replays.items()
            ],
            "layers": self._alone(lambda: layers_of(subject, whole[0])) or [],
            "halves": self._alone(lambda: halves_of(subject, samples[0])) or [],
            "accumulate_s": self._alone(lambda: accumulating_s(subject, samples[0])) or 0.0,
            "data_s": self._alone(lambda: loading_s(subject, samples[0])) or 0.0,
            "host": self._alone(lambda: list(host_s(subject, samples[0]))) or [0.0, 0.0, 0.0],
            "variants": {name: self._variant(changes, samples[0]) for name, changes in variants.items()},
            "spread": median(self.doubts) if self.doubts else 0.0,
            **self._together(subject, samples[0], folder),
        }

    def _in_turns(self, rounds: Mapping[tuple[int, int], Parts]) -> dict[tuple[int, int], list[float]]:
        """Run all rounds several times, every second time in reverse order; return the means of their times."""
        for (_, size), parts in rounds.items():  # the first passes of a process are slow
            if size:
                self._round(self.count, *parts)
        found: dict[tuple[int, int], list[list[float]]] = {key: [] for key in rounds}
        for turn in range(TURNS):
            for key in list(rounds)[:: -1 if turn % 2 else 1]:
                found[key].append(self._round(key[0], *rounds[key]))
        for turns in found.values():
            self.doubts += [
                (max(times) - min(times)) / 2 / fmean(times) for times in zip(*turns, strict=True) if any(times)
            ]
        return {key: [fmean(times) for times in zip(*turns, strict=True)] for key, turns in found.items()}

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
        return [median(times[1:]) if times else 0.0 for times in took]

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
                return self._round(self.count, replaying(*passes_of(subject, size)))
            return self._round(self.count, *passes_of(subject, size))
        except (RefusedError, RuntimeError):
            return None

    def _together(self, subject: TimedModel, size: int, folder: str) -> dict[str, Any]:
        """Time collectives over the loopback, with idle cores and beside a computation, and steps of pipelines."""
        if self.count < 2:
            return {}
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "nccl" if self.device.type == GPUS else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=self.rank, world_size=self.count)
        messages = beside_gpu(subject, size) if backend == "nccl" else beside_cpu(subject, size)
        steps = steps_of(self.settings, self.device, rows_of(subject, size))
        self.barrier.wait(LIMIT_S)
        dist.destroy_process_group()
        return {"messages": messages, "steps": steps}


if __name__ == "__main__":
    sys.exit(main())
