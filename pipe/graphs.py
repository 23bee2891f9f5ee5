"""Forwards and backwards of a stage as CUDA graphs, each launched with one call, where kernels are short.

    step 0   F B F B ...             eagerly; which forms micro-batches have, and how many of one are in flight, is seen
    step 1   record, record, ...     as many slots: inputs, all that lives from a forward to its backward, outputs
             f b f b ...             each micro-batch copied into a slot, replayed, its output copied out
    slot     F | B   or  F | I | W   graphs with memory of their own, so that slots can be in any order in flight

A graph repeats what was recorded: kernels and addresses. So gradients stay where they were at the recording: `.grad`
that is None when a step begins is the same tensor again, full of zeros; hooks of parameters and modules would not be
called, so parameters that have some are refused. Where weights have moved, layers changed between training and
evaluation or learn no longer, all is recorded anew. A micro-batch of another form runs eagerly, and is recorded before
the next step. Layers whose random numbers have seeds of their own run eagerly: a seed would be recorded, too.

How this differs from `torch.cuda.make_graphed_callables`: a micro-batch's backward need not follow its forward.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from muster.pipe.draws import Hooks
from muster.pipe.passages import WholeGraph
from muster.pipe.splitting.halves import WeightQueue
from muster.pipe.stage import Stage
from muster.pipe.wires.channels import Layout


def graphs_for(
    stages: Iterable[Stage], hooks: Hooks, device: torch.device, *, layerwise: bool, recompute: bool
) -> "Graphs":
    """Return what records a rank's stages.

    Raises:
        ValueError: there is no GPU, or forwards are to be done twice.
    """
    if device.type != "cuda":
        raise ValueError(f"cuda_graphs: layers are on {device}; move them to a GPU, or leave it out")
    if layerwise or recompute:
        raise ValueError("cuda_graphs do not go with layerwise or recompute: what is recorded keeps its memory anyway")
    return Graphs(stages, hooks, device)


class Form(NamedTuple):
    """What a recorded micro-batch cannot change."""

    stage: int
    x: Layout
    learns: bool  # the gradient of x is wanted
    targets: Layout | None


class Graphs:
    """The recorded micro-batches of a rank's stages, and what is needed to record more."""

    def __init__(self, stages: Iterable[Stage], hooks: Hooks, device: torch.device) -> None:
        self.queue: WeightQueue | None = None
        self._stages = {stage.number: stage for stage in stages}
        self._layers = [layer for stage in self._stages.values() for layer in stage.layers]
        self._hooks, self._device = hooks, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._slots: dict[Form, list[_Slot]] = {}
        self._free: dict[Form, list[_Slot]] = {}
        self._in_flight: Counter[Form] = Counter()
        self._most: Counter[Form] = Counter()  # in flight at once so far
        self._gradient: dict[Form, Layout] = {}  # of the stage's output
        self._gaining: dict[nn.Parameter, Tensor | None] = {}  # parameters that got gradients, and where these stay
        self._signature: tuple[object, ...] = ()

    def begin(self) -> None:
        """Get ready for a step: record what was seen before, and give gradients their places.

        Raises:
            RuntimeError: a stage does what cannot be recorded, or its parameters have hooks.
        """
        self._in_flight.clear()
        if self._hooks.seeds is not None:
            return
        if self._signature != (signature := self._now()):
            self._signature = signature
            self._slots, self._gradient, self._gaining = {}, {}, {}
            self._most.clear()
        lacking = {form: self._most[form] - len(self._slots.get(form, ())) for form in self._gradient}
        if self._slots or any(lacking.values()):
            self._place_gradients()
        for form, count in lacking.items():
            for _ in range(count):
                self._record(form)
        self._free = {form: list(slots) for form, slots in self._slots.items()}

    def end(self) -> None:
        """Learn which parameters have gradients by now."""
        for layer in self._layers:
            for each in layer.parameters():
                if each.grad is not None:
                    self._gaining.setdefault(each, None)

    def make(self, stage: Stage, microbatch: int) -> "Passage":
        """Return a micro-batch's way through a stage, recorded or not."""
        return Passage(self, stage, microbatch)

    def take(self, form: Form) -> "_Slot | None":
        """Take a free slot of a form, None where there is none."""
        self._in_flight[form] += 1
        self._most[form] = max(self._most[form], self._in_flight[form])
        free = self._free.get(form)
        return free.pop() if free else None

    def give_back(self, form: Form, slot: "_Slot | None") -> None:
        """Hear that a micro-batch is through."""
        self._in_flight[form] -= 1
        if slot is not None:
            self._free[form].append(slot)

    def saw_gradient(self, form: Form, gradient: Tensor) -> None:
        """Learn what gradients of outputs are like."""
        self._gradient[form] = Layout.of(gradient)

    def _record(self, form: Form) -> None:
        stage = self._stages[form.stage]
        told, self._hooks.on_forward = self._hooks.on_forward, None
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a cast weight would lie in the first slot's memory
        try:
            slot = _Slot(stage, form, self._gradient[form], self.queue, self._stream, self._device)
        except RuntimeError as error:
            raise RuntimeError(
                f"cuda_graphs: stage {form.stage} could not be recorded: {error}; leave cuda_graphs out, or what asks "
                "the host within a layer"
            ) from error
        finally:
            self._hooks.on_forward = told
            torch.set_autocast_cache_enabled(cached)
        self._slots.setdefault(form, []).append(slot)

    def _place_gradients(self) -> None:
        """Let every parameter that gains have its gradient where graphs add to it."""
        empty: list[Tensor] = []
        for each, place in self._gaining.items():
            if each._backward_hooks or each._post_accumulate_grad_hooks:
                name = next(name for layer in self._layers for name, own in layer.named_parameters() if own is each)
                raise RuntimeError(
                    f"cuda_graphs: parameter {name!r} has hooks, which a recorded backward would not call; leave "
                    "cuda_graphs out, or the hooks"
                )
            if each.grad is None:
                own = torch.empty_like(each) if place is None else place
                empty.append(own)
            else:
                own = each.grad if place is None or place is each.grad else place.copy_(each.grad)
            each.grad = self._gaining[each] = own
        if empty:  # with minus zero, to which any first gradient, minus zero too, adds up to itself
            torch._foreach_zero_(empty)
            torch._foreach_neg_(empty)

    def _now(self) -> tuple[object, ...]:
        """Describe what recorded graphs take for granted."""
        parts = [part for layer in self._layers for part in layer.modules()]
        tensors = [each for layer in self._layers for each in (*layer.parameters(), *layer.buffers())]
        kind = self._device.type
        return (
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            tuple(part.training for part in parts),
            tuple((each.data_ptr(), each.requires_grad) for each in tensors),
        )


class _Slot:
    """The graphs of one micro-batch in flight, and what they read and leave."""

    def __init__(
        self,
        stage: Stage,
        form: Form,
        gradient: Layout,
        queue: WeightQueue | None,
        stream: torch.cuda.Stream,
        device: torch.device,
    ) -> None:
        self.x = form.x.empty(device).zero_()
        self.targets = None if form.targets is None else form.targets.empty(device).zero_()
        self.gradient = gradient.empty(device).zero_()
        self._pool, self._stream = torch.cuda.graph_pool_handle(), stream
        self.of_x: Tensor | None = None
        self.backward = self.weights = None
        passage = WholeGraph(stage, 0)
        with torch.enable_grad():
            with self._recorded() as self.forward:
                self.output = passage.forward(self.x.detach().requires_grad_(form.learns), self.targets)
            if not passage.learns:
                return
            with self._recorded() as self.backward, nullcontext() if queue is None else queue.collecting(self):
                self.of_x = passage.backward(self.gradient)
        if queue is not None:
            with self._recorded() as self.weights:
                queue.run(self)

    @contextmanager
    def _recorded(self) -> Iterator[torch.cuda.CUDAGraph]:
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks about events of other streams from a thread of its own, which may go on.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            yield graph


class Passage:
    """A micro-batch's way through a stage: in a slot, if there is one for its form."""

    def __init__(self, graphs: Graphs, stage: Stage, microbatch: int) -> None:
        self._graphs, self._stage, self._microbatch = graphs, stage, microbatch

    def forward(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run the stage; return its output, or loss, detached."""
        layout = None if targets is None else Layout.of(targets)
        self._form = Form(self._stage.number, Layout.of(x), x.requires_grad, layout)
        slot = self._slot = self._graphs.take(self._form)
        if slot is None:
            self._eager = WholeGraph(self._stage, self._microbatch)
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
            slot.forward.replay()
            output = slot.output.clone()  # the slot is another micro-batch's before all have read this
        self.learns = slot.backward is not None
        if not self.learns:
            self._done()
        return output

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Add the gradients of parameters to theirs; return that of `x`, None where it does not learn."""
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
