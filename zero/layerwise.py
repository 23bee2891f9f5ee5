"""ZeRO stage 3 in its simplest form, as in a course: layer by layer, without overlap. Slow, for learning.

    forward     gather 1 · run 1 · free 1 | gather 2 · run 2 · free 2 | ...              one layer at a time is whole
    backward    ... | gather 2 · grad 2 · free 2 · reduce 2 | gather 1 · grad 1 · free 1 · reduce 1
    step        every rank steps its slices; nothing is gathered

    model = Layerwise(nn.Sequential(...), loss=lambda head, x, targets: cross_entropy(head(x), targets))
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    model.backward(model(inputs, targets))
    optimizer.step()
    optimizer.zero_grad()

Memory of a rank, for P parameters on W ranks, with L in the largest layer: P / W each of parameters, gradients and
states. While a layer runs, also its L parameters. In the backward, also its gradients twice: as `autograd.grad` returns
them, and flat. The graph is cut between layers, but each layer's graph is kept from forward to backward, with all saved
activations. Real stage 3 keeps those, too; here layers that work in place also get a copy of their input.

Communication: P twice to gather, and P twice to reduce, because an all-reduce sends twice as much as a reduce-scatter.
In total 4 (W - 1) / W P, where real stage 3 sends 3 (W - 1) / W P.
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
from muster.zero.whole import Presence


class Layer:
    """A layer, and this rank's slices of its parameters (`local_params`)."""

    def __init__(self, name: str, module: nn.Module, parameters: Named, *, rank: int, ranks: int) -> None:
        self.name = name
        self.module = module
        # `get_local_info`: flattened, padded to W equal slices, sliced; one flat tensor per type of parameter.
        # `FlatParameters` keeps the `unsharded_param_shapes`: while allocated, parameters are views of it.
        self.homes = [FlatParameters(each, rank=rank, ranks=ranks) for each in by_kind(parameters)]
        for home in self.homes:
            home.split()
        self.works_in_place = any(getattr(part, "inplace", False) for part in module.modules())
        self.handles = [part.register_forward_pre_hook(self.require_whole) for part in module.modules()]

    def require_whole(self, *_: object) -> None:
        """Refuse to use freed parameters: reading freed memory would crash the process."""
        if not all(home.is_whole for home in self.homes):
            raise RuntimeError(
                f"{self.name}: used while its parameters are sharded; call the Layerwise wrapper, or use gather_full()"
            )


class Sliced(Presence):
    """Parameters that are whole only when needed: those of the running layer, or all within `all_open`."""

    def __init__(self, layers: Sequence[Layer], gather: Callable[[Layer], None], free: Callable[[Layer], None]) -> None:
        self.layers = layers
        self.gather = gather
        self.free = free
        self.handles = [handle for layer in layers for handle in layer.handles]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def require_all(self, *_: object) -> None:
        """Refuse to use parameters that are not gathered."""
        for layer in self.layers:
            layer.require_whole()

    def forward(self) -> AbstractContextManager[None]:
        """Do nothing: the forward gathers layer by layer."""
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

    def spread(self, homes: Sequence[FlatParameters]) -> None:
        """Invalidate graphs from before a step. The next forward gathers."""
        for home in homes:
            home.outdate()

    def synchronize(self) -> None:
        """Do nothing: nothing is in progress between calls."""


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
                raise ValueError(f"{name} is {known_as}, which is freed when layer {first} has run; do not tie layers")
    for name, each in module.named_parameters():
        if id(each) not in owner:
            raise ValueError(f"{name} belongs to no layer, so it would never be gathered; move it into a layer")
    return layers


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Layerwise(Sharded):
    """Wrap an `nn.Sequential` whose layers take and return one tensor, and shard all of its state.

    `loss` maps the last layer, its input and the targets to the loss. Without it, forward returns the last layer's
    output, from which any loss may be computed. Every backward reduces gradients; several backwards add up in the
    slices.

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

    def _prepare(self) -> None:  # `init_layers_and_params`; rank 0's parameters have been broadcast before
        rank = dist.get_rank(self.process_group)
        self.layers = [Layer(*each, rank=rank, ranks=self.ranks) for each in self._named]
        self.homes = [home for layer in self.layers for home in layer.homes]
        self.units = [layer.name for layer in self.layers]
        self.gather = gather_for(self.process_group, self.device)
        presence = Sliced(self.layers, self.gather_param_data, self.free)
        self._kept: list[tuple[Tensor, Tensor]] = []  # for each layer its input (a leaf) and its output with its graph
        self._result: Tensor | None = None  # the output of the last layer, as a leaf
        self._waits: list[Wait] = []  # for the reductions of the last backward
        presence.handles.append(self.module.register_state_dict_pre_hook(presence.require_all))  # type: ignore[no-untyped-call]
        self.presence = presence

    # A step ---------------------------------------------------------------------------------------------------------

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Run layer after layer; return the loss, or the output without `loss` or targets.

        Tensors for the backward are kept until the next forward with gradients. A forward without gradients keeps them.
        """
        with self.presence.forward():
            return self._run(inputs, targets)

    def _run(self, inputs: Tensor, targets: Tensor | None) -> Tensor:
        learns = torch.is_grad_enabled()
        if learns:
            self._keep_up()
            self._kept, self._result = [], None
        x, kept = inputs, []
        for layer in self.layers:
            taken = x.clone() if layer.works_in_place else x  # a leaf must not be overwritten
            self.gather_param_data(layer)
            try:
                if layer is self.layers[-1] and self.loss is not None and targets is not None:
                    output = self.loss(layer.module, taken, targets)
                else:
                    output = layer.module(taken)
            finally:
                self.free(layer)
            if learns:
                kept.append((x, output))
            x = output.detach().requires_grad_(output.requires_grad)
        if learns:
            self._kept, self._result = kept, x
        if x.requires_grad:
            x.register_hook(self._require_own_backward)  # type: ignore[no-untyped-call]
        return x

    def backward(self, loss: Tensor) -> None:
        """Compute gradients of a loss that the last forward with gradients returned, or that depends on its output.

        Raises:
            RuntimeError: If there was no such forward, or the loss does not depend on it.
        """
        if self._result is None or not self._result.requires_grad or not loss.requires_grad:
            raise RuntimeError(
                "backward() needs a forward with gradients before it; call the Layerwise once per backward"
            )
        result, self._result, self._waits = self._result, None, []
        (gradient,) = torch.autograd.grad(loss, result, allow_unused=True)
        if gradient is None:
            self._result = result
            raise RuntimeError(
                "this loss does not depend on the last forward; run its backward before the next forward"
            )
        for layer in reversed(self.layers):
            x, output = self._kept.pop()
            if not output.requires_grad:  # no earlier layer is trainable
                continue
            learning = [home for home in layer.homes if home.trains]
            wanted = [*(each for home in learning for each in home.parameters), *([x] if x.requires_grad else [])]
            self.gather_param_data(layer)  # into the same tensors, because the forward's graph has saved views of them
            # One call per layer: gradients of its output with respect to its parameters and its input.
            gradients = list(torch.autograd.grad(output, wanted, gradient, materialize_grads=True))
            self.free(layer)
            if x.requires_grad:
                gradient = gradients.pop()
            for home in learning:
                own, gradients = gradients[: len(home.parameters)], gradients[len(home.parameters) :]
                home.add_gradient(self.get_local_grad_shard(home, own))

    def gather_param_data(self, layer: Layer) -> None:
        """Gather a layer's parameters from all ranks' slices. A collective."""
        for home in layer.homes:
            home.take_memory()
            self._tell(True)
            finished = LOG.open("all_gather", home.full_bytes)
            all_gather(home.full, home.sent(), group=self.process_group)
            finished()
            self._tell(False)
            home.arrive()

    def free(self, layer: Layer) -> None:
        """Free the memory of a layer's whole parameters."""
        for home in layer.homes:
            home.free()

    def get_local_grad_shard(self, home: FlatParameters, gradients: Sequence[Tensor]) -> Tensor:
        """Return this rank's slice of the mean gradients, by all-reduce and slicing. A collective.

        Gradients are divided before the sum, because a sum of 16-bit gradients could overflow.
        """
        flat = torch.zeros(home.layout.length, dtype=home.dtype, device=home.device)
        torch._foreach_copy_(home.views_of(flat), list(gradients))
        flat /= self.ranks
        self._tell(True)
        self._waits.append(Wait(self.device))
        finished = LOG.open("all_reduce", home.full_bytes)
        dist.all_reduce(flat, group=self.process_group)
        finished()
        self._waits[-1].stop()
        self._tell(False)
        return flat[home.begin : home.end].clone()  # a view would keep the whole tensor alive

    def _require_own_backward(self, gradient: Tensor) -> None:
        if self._result is not None:
            raise RuntimeError("this graph ends after the last layer; call backward(loss) of the Layerwise instead")

    # What `DataParallel` asks of every wrapper ----------------------------------------------------------------------

    def finish_gradient_synchronization(self) -> None:
        """Do nothing: a backward has reduced all gradients when it returns."""

    def stats(self) -> Stats:
        """Return the cost of the last backward's reductions. All of it is waiting, because nothing overlaps."""
        sent = sum(home.full_bytes for home in self.homes if home.trains) if self._waits else 0
        return Stats(len(self._waits), sent, sum(each.seconds for each in self._waits))
