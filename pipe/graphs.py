"""Record forwards and backwards of a stage as CUDA graphs, which replay many short kernels with one launch.

    step 0   F B F B ...             eager; notes the forms of micro-batches, and how many of each are in flight at once
    step 1   record, record, ...     that many slots: inputs, everything kept between forward and backward, outputs
             f b f b ...             copy each micro-batch into a slot, replay, copy the output out
    slot     F | B   or  F | I | W   graphs with their own memory, so that slots may be in flight in any order

A graph repeats the recorded kernels on the recorded addresses. So gradients stay at the addresses of the recording: if
a `.grad` is None when a step begins, it becomes the recorded tensor again, filled with zeros. A replay calls no hooks
of modules or parameters, so layers and parameters with hooks are refused. Everything is recorded again if a weight has
moved or its `requires_grad` has changed, or if layers have switched mode (training, evaluation, autocast). A
micro-batch of a new form runs eagerly and is recorded before the next step. If the user seeds layers, a slot has a
generator state for each layer, whose seed is set before each replay.

With `cuda_graphs="auto"` a rank runs eagerly if it cannot record, or if the graphs would leave too little memory for an
eager step. Other ranks need not know: only a rank's own work is recorded, never a message.

Unlike with `torch.cuda.make_graphed_callables`, a micro-batch's backward need not directly follow its forward.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from muster.pipe.microbatch_passes import WholeGraphPass
from muster.pipe.rng_streams import Hooks, RecordedSeeds
from muster.pipe.splitting.halves import WeightQueue
from muster.pipe.stage import Stage
from muster.pipe.wires.channels import TensorLayout

# Bytes that must be free before recording, over those that an eager step has used beside what it keeps: the graph keeps
# as many, and steps of another form and evaluations still run eagerly. Slots of pipelines waste about a third.
NEEDED: Final = 2.25
NEEDED_BY_SLOTS: Final = 3.0

When = bool | Literal["auto"]


def graphs_for(
    stages: Iterable[Stage], hooks: Hooks, device: torch.device, *, when: When, recompute: bool
) -> "Graphs | None":
    """Return the recorder for a rank's stages. Return None if nothing is to be recorded.

    Raises:
        ValueError: If the layers are not on a GPU, or `recompute` is set, unless `when` is "auto".
    """
    if not when or (when == "auto" and (device.type != "cuda" or recompute)):
        return None
    if device.type != "cuda":
        raise ValueError(f"cuda_graphs: layers are on {device}; move them to a GPU, or omit cuda_graphs")
    if recompute:
        raise ValueError("cuda_graphs keeps all activations, so recompute cannot save memory; omit one of them")
    return Graphs(stages, hooks, device, optional=when == "auto")


def room_for(peak: int, device: torch.device, needed: float = NEEDED) -> str:
    """Return why a graph has no room beside an eager step, which allocated up to `peak` bytes; empty if it has."""
    free = torch.cuda.mem_get_info(device)[0]
    held = torch.cuda.memory_allocated(device)
    return too_little(peak, held, free + torch.cuda.memory_reserved(device) - held, needed)


def too_little(peak: int, held: int, free: int, needed: float = NEEDED) -> str:
    """Return why a graph has no room: a step allocates up to `peak` bytes and keeps `held`, and `free` are free."""
    wanted = int(needed * max(0, peak - held))
    if wanted <= free:
        return ""
    return f"a graph beside eager steps may need {wanted / 2**20:.0f} MB, but {free / 2**20:.0f} MB of the GPU are free"


def pool_bytes(pools: Iterable[Any]) -> int:
    """Return the bytes that the memory pools of recorded graphs have reserved."""
    wanted = {tuple(pool) for pool in pools}
    segments = torch.cuda.memory_snapshot() if wanted else ()  # type: ignore[no-untyped-call]
    return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) in wanted)


def hooked(layers: Iterable[tuple[str, nn.Module]]) -> str:
    """Return the name of the first module with hooks, which a replay would not call; empty if there is none."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for name, layer in layers:
        for path, part in layer.named_modules():
            if any(getattr(part, kind, None) for kind in kinds):
                return f"{name}.{path}".strip(".")
    return ""


class GraphForm(NamedTuple):
    """The properties that a micro-batch must share with a recording to be replayed from it."""

    stage: int
    x: TensorLayout
    learns: bool  # True if the gradient of x is needed
    targets: TensorLayout | None


class Graphs:
    """The recorded graphs of a rank's stages, and the recorder of new ones."""

    def __init__(self, stages: Iterable[Stage], hooks: Hooks, device: torch.device, *, optional: bool) -> None:
        self.queue: WeightQueue | None = None
        self.optional = optional  # True: if something cannot be recorded, run eagerly
        self.off = ""  # the reason if all layers run eagerly now
        self.ignores_hooks = False  # True: all hooks are the caller's, which can do without them in a replay
        self._stages = {stage.number: stage for stage in stages}
        self._layers = [layer for stage in self._stages.values() for layer in stage.layers]
        self._hooks, self._device = hooks, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._slots: dict[GraphForm, list[_Slot]] = {}
        self._free: dict[GraphForm, list[_Slot]] = {}
        self._in_flight: Counter[GraphForm] = Counter()
        self._most: Counter[GraphForm] = Counter()  # largest number of micro-batches in flight so far
        self._gradient: dict[GraphForm, TensorLayout] = {}  # layout of the gradient of the stage's output
        self._gaining: dict[nn.Parameter, Tensor | None] = {}  # parameters with gradients, and the fixed tensor of each
        self._signature: tuple[object, ...] = ()

    def begin(self) -> None:
        """Prepare a step: record graphs for the forms seen before, and put gradients into their fixed tensors.

        Raises:
            RuntimeError: If a stage cannot be recorded, or its parameters have hooks.
        """
        self._in_flight.clear()
        if self.off:
            return
        try:
            self._prepare()
        except RuntimeError as error:
            if not self.optional:
                raise
            self.off = str(error).removeprefix("cuda_graphs: ").partition(";")[0]
            self._slots, self._free, self._gradient, self._gaining = {}, {}, {}, {}
            torch.cuda.empty_cache()

    @property
    def bytes(self) -> int:
        """The memory that the graphs keep for themselves."""
        return pool_bytes(slot.pool for slots in self._slots.values() for slot in slots)

    def _prepare(self) -> None:
        named = [pair for stage in self._stages.values() for pair in zip(stage.names, stage.layers, strict=True)]
        if not self.ignores_hooks and (name := hooked(named)):
            raise RuntimeError(
                f"cuda_graphs: {name!r} has hooks, which a replay would not call; omit cuda_graphs, or remove the hooks"
            )
        if self._signature != (signature := self._now()):
            self._signature = signature
            self._slots, self._gradient, self._gaining = {}, {}, {}
            self._most.clear()
        lacking = {form: self._most[form] - len(self._slots.get(form, ())) for form in self._gradient}
        if self.optional and any(lacking.values()):
            peak = torch.cuda.max_memory_allocated(self._device)
            if why := room_for(peak, self._device, NEEDED_BY_SLOTS):
                raise RuntimeError(why)
        if self._slots or any(lacking.values()):
            self._place_gradients()
        for form, count in lacking.items():
            for _ in range(count):
                self._record(form)
        self._free = {form: list(slots) for form, slots in self._slots.items()}

    def end(self) -> None:
        """End a step: note which parameters have gradients."""
        for layer in self._layers:
            for each in layer.parameters():
                if each.grad is not None:
                    self._gaining.setdefault(each, None)

    def make(self, stage: Stage, microbatch: int) -> "GraphedPass":
        """Return the pass of a micro-batch through a stage, recorded or not."""
        return GraphedPass(self, stage, microbatch)

    def take(self, form: GraphForm) -> "_Slot | None":
        """Take a free slot for a form; return None if there is none."""
        self._in_flight[form] += 1
        self._most[form] = max(self._most[form], self._in_flight[form])
        free = self._free.get(form)
        return free.pop() if free else None

    def give_back(self, form: GraphForm, slot: "_Slot | None") -> None:
        """Make a slot free again after the micro-batch's last graph."""
        self._in_flight[form] -= 1
        if slot is not None:
            self._free[form].append(slot)

    def saw_gradient(self, form: GraphForm, gradient: Tensor) -> None:
        """Record the layout of an output's gradient."""
        self._gradient[form] = TensorLayout.of(gradient)

    def _record(self, form: GraphForm) -> None:
        stage = self._stages[form.stage]
        hook, self._hooks.on_forward = self._hooks.on_forward, None
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # autocast would cache cast weights in the first slot's memory
        try:
            slot = _Slot(stage, form, self._gradient[form], self.queue, self._stream, self._device, self._hooks)
        except RuntimeError as error:
            raise RuntimeError(
                f"cuda_graphs: stage {form.stage} could not be recorded: {error}; omit cuda_graphs, or do not "
                "read results on the host within a layer"
            ) from error
        finally:
            self._hooks.on_forward = hook
            torch.set_autocast_cache_enabled(cached)
        self._slots.setdefault(form, []).append(slot)

    def _place_gradients(self) -> None:
        """Put every parameter's gradient into the tensor that the graphs add to."""
        empty: list[Tensor] = []
        for each, place in self._gaining.items():
            if (each._backward_hooks or each._post_accumulate_grad_hooks) and not self.ignores_hooks:
                name = next(name for layer in self._layers for name, own in layer.named_parameters() if own is each)
                raise RuntimeError(
                    f"cuda_graphs: parameter {name!r} has hooks, which a replayed backward would not call; omit "
                    "cuda_graphs, or remove the hooks"
                )
            if each.grad is None:
                own = torch.empty_like(each) if place is None else place
                empty.append(own)
            else:
                own = each.grad if place is None or place is each.grad else place.copy_(each.grad)
            each.grad = self._gaining[each] = own
        if empty:  # fill with -0.0: adding a first gradient to it gives exactly that gradient, even -0.0
            torch._foreach_zero_(empty)
            torch._foreach_neg_(empty)

    def _now(self) -> tuple[object, ...]:
        """Return the state that recorded graphs depend on. The graphs are invalid once this state changes."""
        parts = [part for layer in self._layers for part in layer.modules()]
        tensors = [each for layer in self._layers for each in (*layer.parameters(), *layer.buffers())]
        kind = self._device.type
        return (
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            tuple(part.training for part in parts),
            tuple((each.data_ptr(), each.requires_grad) for each in tensors),
        )


class _Slot:
    """The graphs of one micro-batch in flight, with their inputs and outputs."""

    def __init__(
        self,
        stage: Stage,
        form: GraphForm,
        gradient: TensorLayout,
        queue: WeightQueue | None,
        stream: torch.cuda.Stream,
        device: torch.device,
        hooks: Hooks,
    ) -> None:
        self.x = form.x.empty(device).zero_()
        self.targets = None if form.targets is None else form.targets.empty(device).zero_()
        self.gradient = gradient.empty(device).zero_()
        self.pool, self._stream = torch.cuda.graph_pool_handle(), stream
        self.seeds = RecordedSeeds(device, len(stage.seeds(0)))
        self.of_x: Tensor | None = None
        self.backward = self.weights = None
        microbatch_pass = WholeGraphPass(stage, 0)
        with torch.enable_grad():
            with self._seeded(hooks), self._recorded(self.seeds) as self.forward:
                self.output = microbatch_pass.forward(self.x.detach().requires_grad_(form.learns), self.targets)
            if not microbatch_pass.learns:
                return
            with self._recorded() as self.backward, nullcontext() if queue is None else queue.collecting(self):
                self.of_x = microbatch_pass.backward(self.gradient)
        if queue is not None:
            with self._recorded() as self.weights:
                queue.run(self)

    @contextmanager
    def _seeded(self, hooks: Hooks) -> Iterator[None]:
        """Within the block, layers draw from the slot's generator states."""
        own, hooks.seed = hooks.seed, self.seeds.seed
        try:
            with self.seeds.recording():
                yield
        finally:
            hooks.seed = own

    @contextmanager
    def _recorded(self, seeds: RecordedSeeds | None = None) -> Iterator[torch.cuda.CUDAGraph]:
        graph = torch.cuda.CUDAGraph()
        if seeds is not None:
            seeds.register(graph)
        # NCCL's watchdog thread queries events of other streams; thread-local capture mode allows this.
        with torch.cuda.graph(graph, pool=self.pool, stream=self._stream, capture_error_mode="thread_local"):
            yield graph


class GraphedPass:
    """The pass of a micro-batch through a stage: replayed from a slot if one is free for its form, else eager."""

    def __init__(self, graphs: Graphs, stage: Stage, microbatch: int) -> None:
        self._graphs, self._stage, self._microbatch = graphs, stage, microbatch

    def forward(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run the stage; return its output or loss, detached."""
        layout = None if targets is None else TensorLayout.of(targets)
        self._form = GraphForm(self._stage.number, TensorLayout.of(x), x.requires_grad, layout)
        slot = self._slot = self._graphs.take(self._form)
        if slot is None:
            self._eager = WholeGraphPass(self._stage, self._microbatch)
            output = self._eager.forward(x, targets)
            self.learns = self._eager.learns
            if not self.learns:
                self._done()
            return output
        self._stage.announce(self._microbatch)
        with torch.no_grad():
            slot.x.copy_(x)
            if targets is not None and slot.targets is not None:
                slot.targets.copy_(targets)
            slot.seeds.set(self._stage.seeds(self._microbatch))
            slot.forward.replay()
            output = slot.output.clone()  # another micro-batch may reuse the slot before this output has been read
        self.learns = slot.backward is not None
        if not self.learns:
            self._done()
        return output

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Add to the gradients of parameters; return the gradient of `x`, or None if `x` needs none."""
        slot, queue = self._slot, self._graphs.queue
        if slot is None:
            self._graphs.saw_gradient(self._form, gradient)
            of_x = self._eager.backward(gradient)
            del self._eager
        else:
            assert slot.backward is not None
            slot.gradient.copy_(gradient)
            slot.backward.replay()
            of_x = None if slot.of_x is None else slot.of_x.clone()
            if queue is not None and slot.weights is not None:
                queue.keep(slot.weights.replay)
        done: Callable[[], None] = self._done
        if queue is None:
            done()
        else:
            queue.keep(done)
        return of_x

    def _done(self) -> None:
        self._graphs.give_back(self._form, self._slot)
