"""ZeRO stage 3 in its simplest form, for teaching: layer by layer, without overlap, and therefore slow.

    forward     gather 1 · run 1 · free 1 | gather 2 · run 2 · free 2 | ...              one layer at a time is whole
    backward    ... | gather 2 · grad 2 · free 2 · reduce 2 | gather 1 · grad 1 · free 1 · reduce 1
    step        every rank steps its slices; nothing is gathered

    model = Layerwise(nn.Sequential(...), loss=lambda head, x, targets: cross_entropy(head(x), targets))
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    model.backward(model(inputs, targets))
    optimizer.step()
    optimizer.zero_grad()

With P parameters on W ranks, a rank stores P / W parameters, P / W gradients and P / W of each optimizer state. While a
layer runs, the rank also stores all parameters of the layer, and in the backward two copies of their gradients (one
from `autograd.grad`, one flat). The autograd graph is cut between layers. As in real stage 3, each layer's graph and
saved activations are kept from the forward to the backward. A layer that works in place gets a copy of its input.

Per step a rank sends 4 (W - 1) / W P elements: it gathers P elements twice and all-reduces them once, which sends twice
as much as a reduce-scatter. Real stage 3 sends 3 (W - 1) / W P elements.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.ddp.collective_log import LOG
from muster.ddp.gradients import Named
from muster.ddp.primitives import all_gather
from muster.ddp.stats import Stats, Wait
from muster.zero.flat import FlatParameters, by_kind
from muster.zero.gather import gather_for
from muster.zero.sharded import Sharded
from muster.zero.whole import Residency


class Layer:
    """A layer, and this rank's slices of its parameters (`local_params`)."""

    def __init__(self, name: str, module: nn.Module, parameters: Named, *, rank: int, ranks: int) -> None:
        self.name = name
        self.module = module
        # Flatten the parameters, pad them to W equal slices, and slice them (`get_local_info` in course exercises).
        # There is one flat tensor per dtype. `FlatParameters` keeps the shapes (`unsharded_param_shapes` in exercises).
        self.flat_parameters = [FlatParameters(each, rank=rank, ranks=ranks) for each in by_kind(parameters)]
        for flat_parameter in self.flat_parameters:
            flat_parameter.split()
        self.works_in_place = any(getattr(part, "inplace", False) for part in module.modules())
        self.handles = [part.register_forward_pre_hook(self.require_whole) for part in module.modules()]

    def require_whole(self, *_: object) -> None:
        """Raise an error if freed parameters are used, because reading freed memory would crash the process."""
        if not all(flat_parameter.is_whole for flat_parameter in self.flat_parameters):
            raise RuntimeError(
                f"{self.name}: used while its parameters are sharded; call the Layerwise wrapper, or use gather_full()"
            )


class Sliced(Residency):
    """Parameters that are whole only when needed: those of the running layer, or within `all_open` all of them."""

    def __init__(self, layers: Sequence[Layer], gather: Callable[[Layer], None], free: Callable[[Layer], None]) -> None:
        self.layers = layers
        self.gather = gather
        self.free = free
        self.handles = [handle for layer in layers for handle in layer.handles]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def require_all(self, *_: object) -> None:
        """Raise an error if parameters are used that are not gathered."""
        for layer in self.layers:
            layer.require_whole()

    def forward(self) -> AbstractContextManager[None]:
        """Do nothing, because the forward itself gathers layer by layer."""
        return nullcontext()

    @contextmanager
    def all_open(self) -> Iterator[None]:
        for layer in self.layers:
            self.gather(layer)
        try:
            yield
        finally:
            for layer in self.layers:
                self.free(layer)

    def spread(self, flat_parameters: Sequence[FlatParameters]) -> None:
        """Invalidate graphs that were recorded before a step. The next forward gathers the new parameters."""
        for flat_parameter in flat_parameters:
            flat_parameter.outdate()

    def synchronize(self) -> None:
        """Do nothing, because no gather is in progress between calls."""


def layers_of(module: nn.Module) -> Sequence[tuple[str, nn.Module, Named]]:
    """List a sequence's layers with their parameters. Each parameter belongs to exactly one layer.

    Raises:
        TypeError: If the module is not an `nn.Sequential`.
        ValueError: If layers share a parameter, or a parameter belongs to no layer.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"Layerwise runs the layers of an nn.Sequential one by one, got a {type(module).__name__}")
    layers = [
        (name, each, list(each.named_parameters(name))) for name, each in zip(module._modules, module, strict=True)
    ]
    owner: dict[int, tuple[str, str]] = {}
    for layer, _, parameters in layers:
        for name, each in parameters:
            first, known_as = owner.setdefault(id(each), (layer, name))
            if first != layer:
                raise ValueError(f"{name} is tied to {known_as}, which layer {first} frees; do not tie layers")
    for name, each in module.named_parameters():
        if id(each) not in owner:
            raise ValueError(f"{name} belongs to no layer, so it would never be gathered; move it into a layer")
    return layers


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Layerwise(Sharded):
    """Wrap an `nn.Sequential` whose layers take and return one tensor; shard all of its state.

    `loss` maps the last layer, its input and the targets to the loss. Without `loss`, the forward returns the last
    layer's output, from which any loss may be computed. Every backward reduces gradients, and adds them to the slices.

    Raises:
        TypeError: If the module is not an `nn.Sequential`.
        ValueError: If layers share a parameter, or a parameter belongs to no layer; or as in `DataParallel`.
    """

    def __init__(
        self, module: nn.Sequential, process_group: dist.ProcessGroup | None = None, *, loss: Loss | None = None
    ) -> None:
        self._named = layers_of(module)
        self.loss = loss
        super().__init__(module, process_group)

    def _prepare(self) -> None:  # called `init_layers_and_params` in course exercises
        rank = dist.get_rank(self.process_group)
        self.layers = [Layer(*each, rank=rank, ranks=self.ranks) for each in self._named]
        self.flat_parameters = [flat_parameter for layer in self.layers for flat_parameter in layer.flat_parameters]
        self.units = [layer.name for layer in self.layers]
        self.gather = gather_for(self.process_group, self.device)
        residency = Sliced(self.layers, self.gather_param_data, self.free)
        self._kept: list[tuple[Tensor, Tensor]] = []  # by layer: the input (a leaf), and the output with its graph
        self._result: Tensor | None = None  # the output of the last layer, as a leaf
        self.without: set[str] = set()  # parameters on which the last backward's loss did not depend on this rank
        self._waits: list[Wait] = []  # statistics of the last backward's reductions
        residency.handles.append(self.module.register_state_dict_pre_hook(residency.require_all))  # type: ignore[no-untyped-call]
        self.residency = residency

    # A step ---------------------------------------------------------------------------------------------------------

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Run layer after layer. Return the loss or, without `loss` or targets, the output.

        Tensors for the backward are kept until the next forward with gradients enabled.
        """
        with self.residency.forward():
            return self._run(inputs, targets)

    def _run(self, inputs: Tensor, targets: Tensor | None) -> Tensor:
        with_gradients = torch.is_grad_enabled()
        if with_gradients:
            self._detect_changes()
            self._kept, self._result = [], None
        x, kept = inputs, []
        for layer in self.layers:
            taken = x.clone() if layer.works_in_place else x  # because a leaf must not be overwritten
            self.gather_param_data(layer)
            try:
                if layer is self.layers[-1] and self.loss is not None and targets is not None:
                    output = self.loss(layer.module, taken, targets)
                else:
                    output = layer.module(taken)
            finally:
                self.free(layer)
            if with_gradients:
                kept.append((x, output))
            x = output.detach().requires_grad_(output.requires_grad)
        if with_gradients:
            self._kept, self._result = kept, x
        if x.requires_grad:
            x.register_hook(self._require_own_backward)  # type: ignore[no-untyped-call]
        return x

    def backward(self, loss: Tensor) -> None:
        """Compute gradients of a loss. The last forward with gradients returned the loss, or the output from which it
        was computed.

        Raises:
            RuntimeError: If no forward with gradients enabled has run since the last backward, or the loss does not
            depend on that forward.
        """
        if self._result is None or not self._result.requires_grad or not loss.requires_grad:
            raise RuntimeError(
                "backward() needs a forward with gradients before it; call the Layerwise once per backward"
            )
        result, self._result, self._waits, self.without = self._result, None, [], set()
        (gradient,) = torch.autograd.grad(loss, result, allow_unused=True)
        if gradient is None:
            self._result = result
            raise RuntimeError(
                "this loss does not depend on the last forward; run its backward before the next forward"
            )
        for layer in reversed(self.layers):
            x, output = self._kept.pop()
            if not output.requires_grad:  # neither this layer nor an earlier layer is trainable
                continue
            trainable = [flat_parameter for flat_parameter in layer.flat_parameters if flat_parameter.trains]
            wanted = [
                *(each for flat_parameter in trainable for each in flat_parameter.parameters),
                *([x] if x.requires_grad else []),
            ]
            self.gather_param_data(layer)  # into the same memory, because the graph has saved views of it
            # One call per layer computes the gradients of its parameters and of its input.
            found = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
            named = [name for flat_parameter in trainable for name in flat_parameter.names]
            self.without |= {name for name, own in zip(named, found, strict=False) if own is None}
            gradients = [
                torch.zeros_like(each) if own is None else own for each, own in zip(wanted, found, strict=True)
            ]
            self.free(layer)
            if x.requires_grad:
                gradient = gradients.pop()
            for flat_parameter in trainable:
                own, gradients = (
                    gradients[: len(flat_parameter.parameters)],
                    gradients[len(flat_parameter.parameters) :],
                )
                flat_parameter.add_gradient(self.get_local_grad_shard(flat_parameter, own))

    def gather_param_data(self, layer: Layer) -> None:
        """Gather a layer's parameters from all ranks' slices. A collective."""
        for flat_parameter in layer.flat_parameters:
            flat_parameter.take_memory()
            self._notify_wait(True)
            finished = LOG.open("all_gather", flat_parameter.full_bytes)
            all_gather(flat_parameter.full, flat_parameter.sent(), group=self.process_group)
            finished()
            self._notify_wait(False)
            flat_parameter.arrive()

    def free(self, layer: Layer) -> None:
        """Free the memory of a layer's whole parameters."""
        for flat_parameter in layer.flat_parameters:
            flat_parameter.free()

    def get_local_grad_shard(self, flat_parameter: FlatParameters, gradients: Sequence[Tensor]) -> Tensor:
        """All-reduce gradients, and return this rank's slice of their mean. A collective.

        Gradients are divided before the sum, because a sum of 16-bit gradients could overflow.
        """
        flat = torch.zeros(flat_parameter.layout.length, dtype=flat_parameter.dtype, device=flat_parameter.device)
        torch._foreach_copy_(flat_parameter.views_of(flat), list(gradients))
        flat /= self.ranks
        self._notify_wait(True)
        self._waits.append(Wait(self.device))
        finished = LOG.open("all_reduce", flat_parameter.full_bytes)
        dist.all_reduce(flat, group=self.process_group)
        finished()
        self._waits[-1].stop()
        self._notify_wait(False)
        return flat[flat_parameter.begin : flat_parameter.end].clone()  # a view would keep the whole tensor alive

    def _require_own_backward(self, gradient: Tensor) -> None:
        if self._result is not None:
            raise RuntimeError("this graph ends after the last layer; call backward(loss) of the Layerwise instead")

    # Methods that `DataParallel` requires ---------------------------------------------------------------------------

    def finish_gradient_synchronization(self) -> None:
        """Do nothing, because each backward has already reduced its gradients."""

    def stats(self) -> Stats:
        """Return statistics of the last backward's reductions.

        All of their time counts as waiting time, because nothing overlaps.
        """
        sent = (
            sum(flat_parameter.full_bytes for flat_parameter in self.flat_parameters if flat_parameter.trains)
            if self._waits
            else 0
        )
        return Stats(len(self._waits), sent, sum(each.seconds for each in self._waits))
