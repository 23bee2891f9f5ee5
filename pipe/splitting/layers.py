"""Layers whose backward defers the gradients of their weights: `nn.Linear` and convolutions.

    forward    x ──linear, with its weights detached──► y            native operations, so native speed and bits
    backward   dX ◄──native── dY                                     autograd computes only the gradient of x
                               └─ a hook on y keeps (x, dY)          for dW = dY' x, computed later

A layer's class is replaced by a subclass with another `forward`. Parameters, state dict and printed form do not change,
and copies are plain layers. A layer that cannot be split (a computed weight, complex numbers, its own `forward`) keeps
its class. Other kinds of layers also keep their class: their weight gradients are computed together with the gradients
of inputs.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from muster.pipe.splitting import compiled
from muster.pipe.splitting.gradient_capture import Anchored, CaptureHook, SplitSite, capture
from muster.pipe.splitting.weight_gradients import LINEAR, Convolution, GradientKind, PendingQueue

SITE: Final = "_split_site"  # attribute for a layer's `SplitSite`
PLACE: Final = "_split_place"  # attribute for a layer's number in compiled code
CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def kind_of(module: nn.Module) -> GradientKind | None:
    """Return how a layer's weight gradients are computed; None if the layer cannot be split."""
    held, weight = module._parameters, module._parameters.get("weight")
    if weight is None or "bias" not in held or is_lazy(weight) or weight.is_complex() or "forward" in module.__dict__:
        return None
    if type(module).forward is nn.Linear.forward:
        return LINEAR
    return _convolution(module) if isinstance(module, _ConvNd) else None


def split(module: nn.Module, kind: GradientKind, weight_queue: PendingQueue) -> None:
    """Split one layer."""
    ours = _SplitLinear if kind is LINEAR else _SplitConvolution
    site = module.__dict__[SITE] = SplitSite(weight_queue, kind, module)
    module.__dict__[PLACE] = compiled.number(site)
    module.__class__ = _subclass(ours, site.original)  # type: ignore[arg-type]


def is_split(module: nn.Module) -> bool:
    """Return whether a layer is split now."""
    return SITE in module.__dict__


def restore(module: nn.Module) -> None:
    """Restore a split layer's class, unless a parametrization has replaced the split class since then."""
    site = module.__dict__.pop(SITE)
    del module.__dict__[PLACE]
    if type(module) in (_subclass(_SplitLinear, site.original), _subclass(_SplitConvolution, site.original)):
        module.__class__ = site.original


@cache
def _subclass(ours: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """Return the split subclass of a class.

    The subclass has the name of the original class, so that split layers print like plain layers.
    """
    return type(original.__name__, (ours, original), {"__module__": __name__})


def _convolution(module: _ConvNd) -> Convolution | None:
    """Return the settings of a convolution; None for a custom class, or if opposite sides are padded unequally."""
    own = type(module)
    plain = any(own.forward is each.forward and own._conv_forward is each._conv_forward for each in CONVOLUTIONS)
    around = list(module._reversed_padding_repeated_twice)  # both sides of each dimension, last dimension first
    if not plain or around[::2] != around[1::2]:
        return None
    padding = tuple(around[::-2]) if module.padding_mode == "zeros" else (0,) * (len(around) // 2)
    return Convolution(tuple(module.stride), padding, tuple(module.dilation), module.groups)


class _Split(nn.Module):
    """Base class of split layers."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as a plain layer, because a copy has no queue for its weight gradients."""
        plain = object.__new__(self.__dict__[SITE].original)
        plain.__dict__.update((name, each) for name, each in self.__dict__.items() if name not in (SITE, PLACE))
        return plain.__reduce_ex__(1)  # lower, because from protocol 2 on pickle would compare the classes

    def forward(self, input: Tensor) -> Tensor:
        """Run the split layer; run it as a plain one if a norm or mask has replaced its weight or bias."""
        held = self._parameters
        if "weight" not in held or "bias" not in held:
            return super().forward(input)  # type: ignore[no-any-return]
        weight, bias = held["weight"], held["bias"]
        assert weight is not None
        return self._run(input, weight, bias)

    def _run(self, input: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        """Run the layer with its own parameters."""
        raise NotImplementedError

    def _captured(
        self, run: Callable[..., Tensor], x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, *settings: Any
    ) -> Tensor:
        """Run a layer with its weights detached, and put the hook on its output."""
        site: SplitSite = self.__dict__[SITE]
        hook = CaptureHook(site, weight, bias, x)
        arguments = (x, weight.detach(), None if bias is None else bias.detach(), *settings)
        y: Tensor = run(*arguments) if x.requires_grad else Anchored.apply(run, arguments, site.anchor)  # type: ignore[no-untyped-call]
        capture(y, hook)
        return y


class _SplitLinear(_Split):
    """`nn.Linear`, split."""

    def _run(self, input: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        """Map x (..., features) to (..., outputs)."""
        if input.dim() < 2 or not _is_due(weight):
            return functional.linear(input, weight, bias)
        x = _in_autocast(input)
        if torch.compiler.is_compiling():
            place = self.__dict__[PLACE] if x.requires_grad else None
            return functional.linear(x, weight, bias) if place is None else compiled.layer(x, weight, bias, place)
        if x.dim() == 2 or (x.requires_grad and x.is_contiguous()):
            return self._captured(functional.linear, x, weight, bias)
        flat, shape = x.flatten(0, -2), (*x.shape[:-1], len(weight))  # (rows, features)
        if x.is_contiguous():
            return self._captured(functional.linear, flat, weight, bias).view(shape)
        # F.linear flattens an input with more than two dimensions only if the weight requires a gradient. Here the
        # weight is detached, so the input is flattened explicitly, to get the same bits.
        y = self._captured(functional.linear, flat, weight, None).view(shape)
        return y if bias is None else y + bias.to(y.dtype)


class _SplitConvolution(_Split):
    """`nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d`, split."""

    def _run(self, input: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        """Map x (batch, channels, ...) to (batch, outputs, ...)."""
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
            return compiled.layer(x, weight, bias, self.__dict__[PLACE], *settings)
        return self._captured(
            compiled.RUNS[weight.dim() - 2], x, weight, bias, self.stride, padding, self.dilation, self.groups
        )


def _is_due(weight: Tensor) -> bool:
    """Return whether a weight requires a gradient and is a leaf, that is, not computed from other tensors."""
    return weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()


def _in_autocast(x: Tensor) -> Tensor:
    """Cast an input as autocast would, so that the cast tensor is kept for the weight gradients."""
    if not torch._C._is_any_autocast_enabled():  # ten times faster than torch.is_autocast_enabled(device_type)
        return x
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x
