"""Layers whose backward leaves the gradients of their weights for later: `nn.Linear`, and convolutions.

    forward    x ──linear, its weights out of the graph──► y         native operations, so native speed, and bits
    backward   dX ◄──native── dY                                     autograd sees nothing that learns but x
                               └─ a hook on y keeps (x, dY)          for dW = dY' x, done when somebody has time

A layer's class is exchanged for a subclass that has another `forward`: parameters, state dict and the printed form stay
what they are. A layer that cannot be split (a weight that is computed, complex numbers, a `forward` of its own) keeps
its class, and so does everything that is neither linear nor a convolution: their gradients are made with the inputs'.
"""

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from pipe.splitting import compiled
from pipe.splitting.weight_gradients import LINEAR, Convolution, Kind, Work

SITE: Final = "_split_site"  # where a layer keeps its `Site`
PLACE: Final = "_split_place"  # and its number, for compiled code
CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_keeps_graph: Final = torch._C._autograd._get_current_graph_task_keep_graph  # of the backward that runs now
_saving_hooks: Final = torch._C._autograd._top_saved_tensors_default_hooks  # as checkpointing sets them
_OURS: Final = -1  # a key in a tensor's table of hooks that torch, which counts from 0, never gives


class Keeper(Protocol):
    """Who keeps what is left to do."""

    def keep(self, work: Work) -> None:
        """Take one use of a layer, in the backward."""


class Site:
    """What one split layer needs to know."""

    __slots__ = ("__weakref__", "_keeper", "anchor", "kind", "module", "original")

    def __init__(self, keeper: Keeper, kind: Kind, module: nn.Module) -> None:
        self._keeper = weakref.ref(keeper)  # a queue that is gone gives its layers back
        self.kind = kind
        self.module = weakref.ref(module)
        self.original = type(module)
        self.anchor = torch.empty(0, requires_grad=True)  # what an output hangs on whose input needs no gradient

    def keep(self, work: Work) -> None:
        """Take one use of the layer."""
        keeper = self._keeper()
        if keeper is None:
            raise RuntimeError(
                "the backward of a split layer whose WeightQueue is gone; keep the queue, or forward again"
            )
        keeper.keep(work)

    def keep_copies(self, x: Tensor, gradient: Tensor) -> None:
        """Take one use of the layer from compiled code."""
        module = self.module()
        assert module is not None
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        learning = bias if bias is not None and bias.requires_grad else None
        self.keep(Work(self.kind, weight, learning, x.clone(), gradient.clone()))

    def of_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of an input."""
        return self.kind.of_input(gradient, x, weight)


def kind_of(module: nn.Module) -> Kind | None:
    """Say how a layer's weights get their gradients; None for one that cannot be split."""
    weight = module._parameters.get("weight")
    if weight is None or is_lazy(weight) or weight.is_complex() or "forward" in module.__dict__:
        return None
    if type(module).forward is nn.Linear.forward:
        return LINEAR
    return _convolution(module) if isinstance(module, _ConvNd) else None


def split(module: nn.Module, kind: Kind, keeper: Keeper) -> None:
    """Split one layer."""
    ours = _SplitLinear if kind is LINEAR else _SplitConvolution
    site = module.__dict__[SITE] = Site(keeper, kind, module)
    module.__dict__[PLACE] = compiled.number(site)
    module.__class__ = _subclass(ours, site.original)  # type: ignore[arg-type]


def is_split(module: nn.Module) -> bool:
    """True for a layer that is split now."""
    return SITE in module.__dict__


def restore(module: nn.Module) -> None:
    """Give a split layer its own class back."""
    module.__class__ = module.__dict__.pop(SITE).original
    del module.__dict__[PLACE]


@cache
def _subclass(ours: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """Make the class of split layers of a class; it has the original's name, so it prints alike."""
    return type(original.__name__, (ours, original), {"__module__": __name__})


def _convolution(module: _ConvNd) -> Convolution | None:
    """Say how a convolution is done; None for one that is of another class, or padded by unequal sides."""
    own = type(module)
    plain = any(own.forward is each.forward and own._conv_forward is each._conv_forward for each in CONVOLUTIONS)
    around = list(module._reversed_padding_repeated_twice)  # last axis first, both sides
    if not plain or around[::2] != around[1::2]:
        return None
    padding = tuple(around[::-2]) if module.padding_mode == "zeros" else (0,) * (len(around) // 2)
    return Convolution(tuple(module.stride), padding, tuple(module.dilation), module.groups)


class _Tap:
    """A hook on a layer's output: it hands on the input and the output's gradient."""

    __slots__ = ("bias", "site", "unpack", "version", "weight", "x")

    def __init__(self, site: Site, weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor) -> None:
        self.site = site
        self.weight = weight
        self.bias = bias if bias is not None and bias.requires_grad else None
        self.version = x._version
        self.unpack: Callable[[Any], Tensor] | None = None
        self.x: Any = x
        if hooks := _saving_hooks(True):
            with torch.no_grad():  # activation checkpointing keeps something smaller, offloading moves it
                self.x, self.unpack = hooks[0](x.detach()), hooks[1]

    def __call__(self, gradient: Tensor) -> None:
        """Take the output's gradient."""
        x, site = self.x, self.site
        if gradient.requires_grad:
            raise RuntimeError("a split backward has no graph of its own: create_graph=True needs a plain one")
        if x is None:
            raise RuntimeError("a split backward ran twice; give the first one retain_graph=True")
        if self.unpack is not None:
            x = self.unpack(x)
        elif x._version != self.version:
            raise RuntimeError(
                f"the input {tuple(x.shape)} of a split layer was changed in place after its forward (version "
                f"{x._version}, expected {self.version}): its weight's gradient needs it as it was"
            )
        if not _keeps_graph():
            self.x = None
        site.keep(Work(site.kind, self.weight, self.bias, x.data, gradient))  # data: the graph need not stay for it


class _Hooks(dict[int, Callable[[Tensor], Any]]):
    """A tensor's table of hooks, to which others may add theirs: their handles refer to it weakly."""

    __slots__ = ("__weakref__",)


class _Hang(torch.autograd.Function):
    """Give an output a place in the graph though its input has none."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], arguments: tuple[Any, ...], anchor: Tensor) -> Tensor:
        return run(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        return None, None, None


class _Split(nn.Module):
    """What split layers have in common."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a split layer cannot be copied or pickled; restore() its queue first")

    def _tapped(self, run: Callable[..., Tensor], x: Tensor, bias: nn.Parameter | None, *settings: Any) -> Tensor:
        """Run a layer with its weights out of the graph, and tap its output."""
        site: Site = self.__dict__[SITE]
        weight = self._parameters["weight"]
        assert weight is not None
        tap = _Tap(site, weight, bias, x)
        arguments = (x, weight.detach(), None if bias is None else bias.detach(), *settings)
        y: Tensor = run(*arguments) if x.requires_grad else _Hang.apply(run, arguments, site.anchor)  # type: ignore[no-untyped-call]
        # A linear layer's output may be a view of (rows, outputs); in-place operations leave no node but that one's.
        tapped = y if y._base is None else y._base
        tapped._backward_hooks = _Hooks({_OURS: tap})  # as register_hook does, without its handle: in a third
        node: Any = tapped.grad_fn  # of the time
        node._register_hook_dict(tapped)
        return y


class _SplitLinear(_Split):
    """`nn.Linear`, split."""

    def forward(self, input: Tensor) -> Tensor:
        """Map x (..., features) to (..., outputs)."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        if input.dim() < 2 or not _is_due(weight):
            return functional.linear(input, weight, bias)
        x = _in_autocast(input)
        if torch.compiler.is_compiling():
            place = self.__dict__[PLACE] if x.requires_grad else None
            return functional.linear(x, weight, bias) if place is None else compiled.linear(x, weight, bias, place)
        if x.dim() == 2 or (x.requires_grad and x.is_contiguous()):
            return self._tapped(functional.linear, x, bias)
        flat, shape = x.flatten(0, -2), (*x.shape[:-1], len(weight))  # (rows, features)
        if x.is_contiguous():
            return self._tapped(functional.linear, flat, bias).view(shape)
        # A plain layer flattens such an input, too, but only as long as its weight is in the graph.
        y = self._tapped(functional.linear, flat, None).view(shape)
        return y if bias is None else y + bias.to(y.dtype)


class _SplitConvolution(_Split):
    """`nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d`, split."""

    def forward(self, input: Tensor) -> Tensor:
        """Map x (batch, channels, ...) to (batch, outputs, ...)."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        compiling = torch.compiler.is_compiling()
        if input.dim() != weight.dim() or not _is_due(weight) or (compiling and not input.requires_grad):
            return self._conv_forward(input, weight, bias)  # type: ignore[operator, no-any-return]
        assert isinstance(self, _ConvNd)
        x = _in_autocast(input)
        padding: str | int | tuple[int, ...] = self.padding
        if self.padding_mode != "zeros":
            x, padding = functional.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0
        if compiling:
            settings = (self.stride, padding, self.dilation, self.groups)
            return compiled.convolution(x, weight, bias, self.__dict__[PLACE], *settings)
        run = (functional.conv1d, functional.conv2d, functional.conv3d)[weight.dim() - 3]
        return self._tapped(run, x, bias, self.stride, padding, self.dilation, self.groups)


def _is_due(weight: Tensor) -> bool:
    """True if a weight's gradient is to be made, and would be its own: a computed weight hands it on."""
    return weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()


def _in_autocast(x: Tensor) -> Tensor:
    """Return an input in the type that it is computed in: what is kept of it is that."""
    if not torch._C._is_any_autocast_enabled():  # a tenth of what asking for a device costs
        return x
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x
