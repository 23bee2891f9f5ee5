"""Stage 3 as course work writes it: layer by layer. To learn from; slow, for nothing overlaps.

    forward     gather 1 · run 1 · free 1 | gather 2 · run 2 · free 2 | ...              one layer is whole at a time
    backward    ... | gather 2 · grad 2 · free 2 · reduce 2 | gather 1 · grad 1 · free 1 · reduce 1
    step        every rank steps its slices, and nobody gathers

    model = Layerwise(nn.Sequential(...), loss=lambda head, x, targets: cross_entropy(head(x), targets))
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    model.backward(model(inputs, targets))
    optimizer.step()
    optimizer.zero_grad()

Memory of a rank, of P parameters on W ranks, of which the largest layer has L: P / W parameters, gradients and states
each; while a layer is at work its L parameters; in the backward its gradients twice, as `autograd.grad` makes them and
flat. The graph is cut between layers, but each layer's is kept from its forward to its backward, with every activation
that it has saved. Real stage 3 keeps those too; here a layer that works in place has a copy of its input besides.

On the wire: P twice to gather and, as an all-reduce sends twice what a reduce-scatter does, P twice to reduce: in all
4 (W - 1) / W P, of which real stage 3 sends 3.
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
        # `get_local_info`: flattened, padded to W equal slices, sliced; one flat tensor for each type of parameter.
        # `FlatParameters` knows the `unsharded_param_shapes`: while its memory is there, parameters are views of it.
        self.homes = [FlatParameters(each, rank=rank, ranks=ranks) for each in by_kind(parameters)]
        for home in self.homes:
            home.split()
        self.works_in_place = any(getattr(part, "inplace", False) for part in module.modules())
        self.handles = [part.register_forward_pre_hook(self.require_whole) for part in module.modules()]

    def require_whole(self, *_: object) -> None:
        """Refuse what needs the parameters while they are not there: reading freed memory would end the process."""
        if not all(home.is_whole for home in self.homes):
            raise RuntimeError(
                f"{self.name}: used while its parameters are sharded; call the Layerwise around it, or gather_full()"
            )


class Sliced(Presence):
    """Parameters that are whole only where somebody asks: the layer at work, or within `all_open`."""

    def __init__(self, layers: Sequence[Layer], gather: Callable[[Layer], None], free: Callable[[Layer], None]) -> None:
        self.layers = layers
        self.gather = gather
        self.free = free
        self.handles = [handle for layer in layers for handle in layer.handles]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def require_all(self, *_: object) -> None:
        """Refuse what needs all parameters while they are not there."""
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
        """Gather nothing after a step, the next forward does; graphs made before it are refused."""
        for home in homes:
            home.outdate()

    def synchronize(self) -> None:
        """Do nothing: nothing is under way between calls."""


def layers_of(module: nn.Module) -> Sequence[tuple[str, nn.Module, Named]]:
    """List a sequence's layers with their parameters, each of which is one layer's.

    Raises:
        TypeError: the module is no `nn.Sequential`.
        ValueError: layers share a parameter, or one belongs to none.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"layers of an nn.Sequential are run one by one, got a {type(module).__name__}; make it one")
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
            raise ValueError(f"{name} belongs to no layer, so nobody would gather it; move it into one")
    return layers


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Layerwise(Sharded):
    """Wrap an `nn.Sequential` of layers that take and return one tensor, so that ranks share out all of its state.

    `loss` makes the loss of the last layer, its input and the targets. Without it, forward returns the last layer's
    output, of which any loss may be made. Every backward is reduced; the gradients of several add up in the slices.

    Raises:
        TypeError: the module is no `nn.Sequential`.
        ValueError: layers share a parameter, or one belongs to none; or as `DataParallel`.
    """

    def __init__(
        self, module: nn.Sequential, process_group: dist.ProcessGroup | None = None, *, loss: Loss | None = None
    ) -> None:
        self._named = layers_of(module)
        self.loss = loss
        super().__init__(module, process_group)

    def _prepare(self) -> None:  # `init_layers_and_params`; parameters are those of rank 0 by now
        rank = dist.get_rank(self.process_group)
        self.layers = [Layer(*each, rank=rank, ranks=self.ranks) for each in self._named]
        self.homes = [home for layer in self.layers for home in layer.homes]
        self.units = [layer.name for layer in self.layers]
        self.gather = gather_for(self.process_group, self.device)
        presence = Sliced(self.layers, self.gather_param_data, self.free)
        self._kept: list[tuple[Tensor, Tensor]] = []  # of each layer its input, a leaf, and its output with its graph
        self._result: Tensor | None = None  # a leaf again
        self._waits: list[Wait] = []  # of the last backward's reductions
        presence.handles.append(self.module.register_state_dict_pre_hook(presence.require_all))  # type: ignore[no-untyped-call]
        self.presence = presence

    # A step ---------------------------------------------------------------------------------------------------------

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Run layer after layer; return the loss, or the output where there is no `loss` or no targets.

        What a backward needs is kept until the next forward with gradients; one without leaves it alone.
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
            taken = x.clone() if layer.works_in_place else x  # a leaf must stay as it is
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
        """Take the gradients of what the last forward with gradients has returned, or of what was made of it.

        Raises:
            RuntimeError: there was none, or the loss is made of something else.
        """
        if self._result is None or not self._result.requires_grad or not loss.requires_grad:
            raise RuntimeError("backward() needs a forward before it, with gradients: call the Layerwise once for each")
        result, self._result, self._waits = self._result, None, []
        (gradient,) = torch.autograd.grad(loss, result, allow_unused=True)
        if gradient is None:
            self._result = result
            raise RuntimeError("this loss is not made of what the last forward returned: go backward before the next")
        for layer in reversed(self.layers):
            x, output = self._kept.pop()
            if not output.requires_grad:  # nothing before it learns
                continue
            learning = [home for home in layer.homes if home.trains]
            wanted = [*(each for home in learning for each in home.parameters), *([x] if x.requires_grad else [])]
            self.gather_param_data(layer)  # into the same tensors: the forward's graph has saved views of them
            # one call a layer: of its output, by its parameters and its input
            gradients = list(torch.autograd.grad(output, wanted, gradient, materialize_grads=True))
            self.free(layer)
            if x.requires_grad:
                gradient = gradients.pop()
            for home in learning:
                own, gradients = gradients[: len(home.parameters)], gradients[len(home.parameters) :]
                home.add_gradient(self.get_local_grad_shard(home, own))

    def gather_param_data(self, layer: Layer) -> None:
        """Make a layer's parameters whole from all ranks' slices: a collective."""
        for home in layer.homes:
            home.take_memory()
            self._tell(True)
            finished = LOG.open("all_gather", home.full_bytes)
            all_gather(home.full, home.sent(), group=self.process_group)
            finished()
            self._tell(False)
            home.arrive()

    def free(self, layer: Layer) -> None:
        """Give the memory of a layer's whole parameters back."""
        for home in layer.homes:
            home.free()

    def get_local_grad_shard(self, home: FlatParameters, gradients: Sequence[Tensor]) -> Tensor:
        """Return this rank's slice of the mean of all ranks' gradients, by all-reduce and slice: a collective.

        They are divided before they are summed: the sum of 16-bit gradients may not fit into 16 bits.
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
        return flat[home.begin : home.end].clone()  # a view would keep all of it

    def _require_own_backward(self, gradient: Tensor) -> None:
        if self._result is not None:
            raise RuntimeError("this graph ends after the last layer: call backward(loss) of the Layerwise instead")

    # What `DataParallel` asks of every wrapper ----------------------------------------------------------------------

    def finish_gradient_synchronization(self) -> None:
        """Do nothing: a backward has reduced all of it when it returns."""

    def stats(self) -> Stats:
        """Return what the last backward's reductions took: all of it is wait, for nothing runs meanwhile."""
        sent = sum(home.full_bytes for home in self.homes if home.trains) if self._waits else 0
        return Stats(len(self._waits), sent, sum(each.seconds for each in self._waits))
