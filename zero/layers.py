"""What `Layerwise` keeps house with: the layers of a sequence, and when their parameters are whole."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from muster.zero.absent import as_it_is
from muster.zero.flat import FlatParameters, Named, by_kind
from muster.zero.presence import Presence


class Layer:
    """A layer, and this rank's slices of its parameters (`local_params`)."""

    def __init__(self, name: str, module: nn.Module, parameters: Named, *, rank: int, ranks: int) -> None:
        self.name = name
        self.module = module
        # `get_local_info`: flattened, padded to W equal slices, sliced; one flat tensor for each type of parameter.
        # `FlatParameters` knows the `unsharded_param_shapes`: while its memory is there, parameters are views of it.
        self.homes = [FlatParameters(each, rank=rank, ranks=ranks) for each in by_kind(parameters)]
        for home in self.homes:
            home.keeps_rounded = False
            home.split()
            home.free()
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
        """Take the hooks away."""
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
        """Gather all of them."""
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
            with as_it_is():
                torch.autograd.graph.increment_version(home.parameters)

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
