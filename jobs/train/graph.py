"""Record whole training steps as CUDA graphs. A replay is one launch, which speeds up models with short kernels.

    steps of one form     0        1        2        3         4        5
    execution          eager    eager    eager    record,   replay   replay
                                                  replay                        inputs copied in, losses copied out

A graph contains the whole step: forward, backward, the wrapper's communication on its own stream, clipping and the
optimizer. A graph replays recorded addresses, so everything that outlives a step must stay in place: parameters,
optimizer state, buckets, and the learning rate, which is a tensor on the device. Steps of another form (the last batch
of an epoch, an uneven shard) also run eagerly three times, and then get their own graph. Recording executes nothing, so
the recorded step is replayed at once.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from muster.jobs.basics.errors import RefusedError
from muster.jobs.train.data.loading import MicroInput, ShardInput
from muster.jobs.train.profiling.clock import StepMarks

EAGER_STEPS: Final = 3  # steps after which all lazy setup is done: optimizer state, compiled code, NCCL's connections
MOST_GRAPHS: Final = 4  # maximum number of graphs; each keeps its own inputs, and steps rarely have more than two forms

Form = tuple[Any, ...]


Step = Callable[[int, Sequence[ShardInput]], list[Tensor]]


class GraphedSteps:
    """A runner of training steps, which records one step of each form (`form_of`), and then replays it.

    It has no reference to its engine, because a reference cycle would keep graphs alive, and NCCL cannot destroy a
    group while a graph uses it.
    """

    def __init__(self, clock: StepMarks, device: torch.device) -> None:
        require_cuda(device)
        self.clock = clock
        self.recorded: dict[Form, RecordedStep] = {}
        self._device = device
        # Eager steps run on the recording stream, too, so that per-stream objects are created for it.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._seen: Counter[Form] = Counter()

    def run(self, work: Step, step: int, shards: Sequence[ShardInput]) -> list[Tensor]:
        """Run a step on this rank's part of a global batch: eagerly, or by replaying the graph for its `form_of`."""
        form = form_of(shards)
        recorded = self.recorded.get(form)
        if recorded is None:
            if self._seen[form] < EAGER_STEPS or len(self.recorded) == MOST_GRAPHS:
                self._seen[form] += 1
                return self._eagerly(work, step, shards)
            recorded = self.recorded[form] = self._record(work, step, shards)
        losses = recorded.replay(shards)
        self.clock.lap("replay")
        return losses

    def _eagerly(self, work: Step, step: int, shards: Sequence[ShardInput]) -> list[Tensor]:
        now = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            losses = work(step, shards)
        now.wait_stream(self._stream)
        return losses

    def _record(self, work: Step, step: int, shards: Sequence[ShardInput]) -> "RecordedStep":
        with self.clock.muted():
            try:
                return RecordedStep(work, step, shards, self._stream, self._pool)
            except RuntimeError as error:
                raise RefusedError(
                    f"train.cuda_graph: the step could not be recorded: {error}; set cuda_graph: false, "
                    "or remove operations that synchronize with the host within a step"
                ) from error


class RecordedStep:
    """The graph of one step, with its input buffers and its losses."""

    def __init__(
        self, work: Step, step: int, shards: Sequence[ShardInput], stream: torch.cuda.Stream, pool: Any
    ) -> None:
        self.shards = [_own(shard) for shard in shards]
        self.graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog queries events of earlier collectives in its own thread, which must not break the capture.
        with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.losses = work(step, self.shards)

    def replay(self, shards: Sequence[ShardInput]) -> list[Tensor]:
        """Run the step on other inputs of the same form; return its losses as new tensors."""
        for own, given in zip(_tensors(self.shards), _tensors(shards), strict=True):
            own.copy_(given, non_blocking=True)
        self.graph.replay()
        return [loss.clone() for loss in self.losses]


def form_of(shards: Sequence[ShardInput]) -> Form:
    """Return the properties that a recorded step fixes: virtual ranks, shapes and dtypes, samples and weights."""
    return tuple(
        (
            shard.virtual_rank,
            *(
                (
                    *(part for tensor in (micro.inputs, micro.targets) for part in (tuple(tensor.shape), tensor.dtype)),
                    micro.samples,
                    micro.weight,
                )
                for micro in shard.micro_batches
            ),
        )
        for shard in shards
    )


def _own(shard: ShardInput) -> ShardInput:
    """Copy a shard's tensors."""
    micros = (
        replace(micro, inputs=micro.inputs.clone(), targets=micro.targets.clone()) for micro in shard.micro_batches
    )
    return replace(shard, micro_batches=tuple(micros))


def _tensors(shards: Sequence[ShardInput]) -> list[Tensor]:
    micros: list[MicroInput] = [micro for shard in shards for micro in shard.micro_batches]
    return [tensor for micro in micros for tensor in (micro.inputs, micro.targets)]


def require_cuda(device: torch.device) -> None:
    """Check that the device can record graphs.

    Raises:
        RefusedError: if `device` is not a CUDA device.
    """
    if device.type != "cuda":
        raise RefusedError(
            f"train.cuda_graph: this rank computes on {device.type}; set device: cuda, or remove cuda_graph"
        )
