"""Record whole training steps as CUDA graphs. A replay is one launch, which speeds up models with short kernels.

    steps of one form     0        1        2        3         4        5
    execution          eager    eager    eager    record,   replay   replay
                                                  replay                        inputs copied in, losses copied out

A graph contains the whole step: forward, backward, the wrapper's communication on its own streams, clipping and the
optimizer. If ranks may continue in place, a step consists of two graphs. Between them, before the optimizer's graph,
the host checks that no collective was aborted. A graph replays recorded addresses, so everything that outlives a step
must stay in place: parameters, optimizer state, buckets, and the learning rate, which is a tensor on the device. Steps
of another form (the last batch of an epoch, an uneven shard) also run eagerly three times, and then get a graph of
their own. Recording executes nothing, so the recorded step is replayed at once. Dropout draws from generator states
whose seeds are set before each replay.

With `cuda_graph: auto`, all ranks record, or none does: they exchange whether each has room for the graph beside an
eager step, and whether it could record. `jobs/spec/recorded.py` decides about the rest before the first step.
"""

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from muster.jobs.basics.errors import RefusedError
from muster.jobs.train.data.loading import MicroInput, ShardInput
from muster.jobs.train.memory import gauge
from muster.jobs.train.profiling.clock import StepMarks
from muster.jobs.world.world import World
from muster.pipe.graphs import hooked, pool_bytes, room_for
from muster.pipe.rng_streams import RecordedSeeds

EAGER_STEPS: Final = 3  # steps after which all lazy setup is done: optimizer state, compiled code, NCCL's connections
MOST_GRAPHS: Final = 4  # maximum number of graphs; each keeps its own inputs, and steps rarely have more than two forms
RECORDED: Final = f"cuda_graph: steps are replayed from a CUDA graph, after {EAGER_STEPS} eager ones"

Form = tuple[Any, ...]


class GraphsEnded(Exception):
    """The graphs have been destroyed by another thread."""


class Recordable(Protocol):
    """A training step that can be recorded."""

    @property
    def is_checked(self) -> bool:
        """True if the host checks the gradients before the update, so that no graph may contain both."""
        ...

    def run(self, step: int, shards: Sequence[ShardInput]) -> list[Tensor]:
        """Run the step; return its losses."""
        ...

    def differentiate(self, step: int, shards: Sequence[ShardInput]) -> list[Tensor]:
        """Run the first half of the step, up to the clipped mean gradients; return its losses."""
        ...

    def check(self) -> None:
        """Raise an error if the mean gradients may be wrong. Never recorded."""
        ...

    def update(self) -> None:
        """Run the second half of the step, which changes the state. It needs no other rank."""
        ...

    def seeds(self, step: int, shards: Sequence[ShardInput]) -> list[int]:
        """List the seeds of the step's random numbers, in the order in which it sets them."""
        ...

    def seeded_by(self, seed: Callable[[int], None]) -> AbstractContextManager[None]:
        """Return a context in which the step calls `seed` with each of its seeds."""
        ...

    def replayed(self) -> None:
        """Record that a replay has run the step, so that parameters and gradients have changed."""
        ...

    def abandon(self) -> None:
        """Clean up after a recording that failed within the step."""
        ...


class GraphedSteps:
    """A runner of training steps, which records one step of each form (`form_of`), and then replays it.

    With `optional`, a step that cannot be recorded runs eagerly, and `off` has the reason. It has no reference to its
    engine, because a reference cycle would keep graphs alive, and NCCL cannot destroy a group while a graph uses it.
    """

    def __init__(self, clock: StepMarks, world: World, *, optional: bool = False) -> None:
        require_cuda(world.device)
        self.clock = clock
        self.optional = optional
        self.off = ""  # the reason if steps are no longer recorded
        self._all_off = False  # True: all ranks know that
        self.recorded: dict[Form, RecordedStep] = {}
        self._world = world
        self._device = world.device
        # Eager steps run on the recording stream, too, so that per-stream objects are created for it.
        self._stream = torch.cuda.Stream(world.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._launches = threading.Lock()  # held while a graph is recorded or launched, but not during collectives
        self._has_ended = False
        self._seen: Counter[Form] = Counter()

    @property
    def bytes(self) -> int:
        """The memory that the graphs keep for themselves."""
        return pool_bytes([self._pool]) if self.recorded else 0

    def run(self, work: Recordable, step: int, shards: Sequence[ShardInput]) -> list[Tensor]:
        """Run a step on this rank's part of a global batch: eagerly, or by replaying the graph for its `form_of`."""
        form = form_of(shards)
        recorded = self.recorded.get(form)
        if recorded is None:
            if self._seen[form] < EAGER_STEPS or len(self.recorded) == MOST_GRAPHS or self.off:
                self._seen[form] += 1
                return self._eagerly(work, step, shards)
            recorded = self._record(work, step, shards)
            if recorded is None:
                return self._eagerly(work, step, shards)
            with self._alive():
                self.recorded[form] = recorded
        losses = recorded.replay(shards, work.seeds(step, shards), self._alive, work.check)
        work.replayed()
        self.clock.lap("replay")
        return losses

    def _eagerly(self, work: Recordable, step: int, shards: Sequence[ShardInput]) -> list[Tensor]:
        now = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            losses = work.run(step, shards)
        now.wait_stream(self._stream)
        return losses

    def _record(self, work: Recordable, step: int, shards: Sequence[ShardInput]) -> "RecordedStep | None":
        """Record a step. Return None if it cannot be recorded and need not be: a collective if it need not be."""
        if self.optional and self._turned_off(room_for(gauge.overall(self._device)["allocated"], self._device)):
            return None
        why, recorded = "", None
        with self.clock.muted():
            try:
                with self._alive():
                    recorded = RecordedStep(work, step, shards, self._stream, self._pool)
            except RuntimeError as error:
                why = str(error).strip().partition("\n")[0]
                if not self.optional:
                    raise RefusedError(
                        f"train.cuda_graph: the step could not be recorded: {why}; set cuda_graph: false, "
                        "or remove operations that synchronize with the host within a step"
                    ) from error
        if self.optional and self._turned_off(why):
            recorded = None
            work.abandon()
            self._release()
        return recorded

    def make_room(self, why: str) -> bool:
        """Free the graphs of this rank, if it need not record. Before the next step, all ranks must `agree`."""
        if not self.optional or not self.recorded:
            return False
        self.off = self.off or why
        self._release()
        return True

    def agree(self) -> None:
        """If a rank has freed its graphs, free those of all ranks: a collective, until no rank records any more."""
        if self.optional and not self._all_off and self._turned_off(self.off):
            self._release()

    def end(self) -> None:
        """Destroy all graphs, without a wait for the device; no step can be recorded or replayed any more.

        NCCL cannot abort a communicator that a graph uses, and while it tries, a new collective of the rank waits for
        it. So another thread than that of the steps may call this method.
        """
        with self._launches:
            self._has_ended = True
            for each in self.recorded.values():
                each.destroy()
            self.recorded.clear()

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Keep `end` waiting.

        Raises:
            GraphsEnded: if it has been called.
        """
        with self._launches:
            if self._has_ended:
                raise GraphsEnded("the graphs of this step have been destroyed")
            yield

    def _release(self) -> None:
        self.recorded.clear()
        torch.cuda.empty_cache()

    def _turned_off(self, why: str) -> bool:
        """Return whether any rank has a reason not to record: a collective of one number, for which the host waits."""
        reasons = self._world.gather(torch.tensor([int(bool(why))], device=self._device))
        others = [rank for rank, each in enumerate(reasons) if int(each)]
        if others:
            self.off = self.off or why or f"rank {others[0]} cannot record them"
        self._all_off = bool(others)
        return self._all_off


def parts_of(work: Recordable, step: int, shards: Sequence[ShardInput]) -> list[Callable[[], list[Tensor] | None]]:
    """Return the parts of a step that become one graph each: two if the host checks the gradients in between."""
    if not work.is_checked:
        return [lambda: work.run(step, shards)]
    return [lambda: work.differentiate(step, shards), work.update]


class RecordedStep:
    """The graphs of one step, in order, with its input buffers, its seeds and its losses."""

    def __init__(
        self, work: Recordable, step: int, shards: Sequence[ShardInput], stream: torch.cuda.Stream, pool: Any
    ) -> None:
        self.shards = [_own(shard) for shard in shards]
        parts = parts_of(work, step, self.shards)
        self.graphs = [torch.cuda.CUDAGraph() for _ in parts]
        self.seeds = RecordedSeeds(stream.device, len(work.seeds(step, shards)))
        self.seeds.register(self.graphs[0])  # an optimizer draws no random numbers
        self.losses: list[Tensor] = []
        before = _host_states()
        with work.seeded_by(self.seeds.seed), self.seeds.recording():
            for graph, part in zip(self.graphs, parts, strict=True):
                # NCCL's watchdog queries events of earlier collectives in its own thread, which must not break this.
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    self.losses = part() or self.losses
        if _host_states() != before:
            raise RuntimeError("it draws random numbers on the host, which would be the same in every replay")

    def replay(
        self,
        shards: Sequence[ShardInput],
        seeds: Sequence[int],
        launching: Callable[[], AbstractContextManager[None]] = nullcontext,
        check: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """Run the step on other inputs of the same form; return its losses as new tensors.

        Each graph is launched in the context of `launching`. `check` is called between two graphs.
        """
        own, given = _tensors(self.shards), _tensors(shards)
        torch._foreach_copy_(own, given, non_blocking=True)
        self.seeds.set(seeds)
        for index, graph in enumerate(self.graphs):
            if index:
                check()
            with launching():
                graph.replay()
        return [loss.clone() for loss in self.losses]

    def destroy(self) -> None:
        """Destroy the graphs, although objects of this step may still be referenced."""
        for graph in self.graphs:
            graph.reset()


def form_of(shards: Sequence[ShardInput]) -> Form:
    """Return the properties that a recorded step fixes: virtual ranks, shapes and dtypes, samples and weights.

    They follow from the size of the global batch, so all ranks meet a new form in the same step.
    """
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


def _host_states() -> list[Any]:
    """Return the states of the host's generators that a model may draw from."""
    numpy = sys.modules.get("numpy")
    drawn = (
        []
        if numpy is None
        else [each.tolist() if hasattr(each, "tolist") else each for each in numpy.random.get_state()]
    )
    return [torch.get_rng_state().tolist(), random.getstate(), drawn]


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


def require_no_hooks(model: nn.Module) -> None:
    """Check that a model has no hooks yet, because a replay would not call them.

    Raises:
        RefusedError: if a module or a parameter has hooks.
    """
    name = hooked(model.named_children()) or next(
        (name for name, each in model.named_parameters() if each._backward_hooks or each._post_accumulate_grad_hooks),
        "",
    )
    if name:
        raise RefusedError(
            f"train.cuda_graph: {name} has hooks, which a replayed step would not call; remove the hooks, or set "
            "cuda_graph: false"
        )
