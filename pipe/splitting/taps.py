"""The hook on a split layer's output: in the backward it hands on what the layer's weights need later.

    y = linear(x)       its weights are out of the graph        tap(y, Tap(site, weight, bias, x))
    dY comes            the tap gives (x, dY) to the layer's site, which gives it to whoever keeps what is left to do

An output whose input needs no gradient hangs on the site's anchor, or there would be no backward to hook into.
"""

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from muster.pipe.splitting.weight_gradients import Keeper, Kind, Work

_keeps_graph: Final = torch._C._autograd._get_current_graph_task_keep_graph  # of the backward that runs now
_saving_hooks: Final = torch._C._autograd._top_saved_tensors_default_hooks  # as checkpointing sets them
_OURS: Final = -1  # a key in a tensor's table of hooks that torch, which counts from 0, never gives


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


class Tap:
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


class Hang(torch.autograd.Function):
    """Give an output a place in the graph though its input has none."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], arguments: tuple[Any, ...], anchor: Tensor) -> Tensor:
        return run(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        return None, None, None


def tap(y: Tensor, hook: Tap) -> None:
    """Call the hook with the gradient of a layer's output.

    A linear layer's output may be a view of (rows, outputs); in-place operations leave no node but that one's.
    """
    tapped = y if y._base is None else y._base
    tapped._backward_hooks = _Hooks({_OURS: hook})  # as register_hook does, without its handle: in a third of the time
    node: Any = tapped.grad_fn
    node._register_hook_dict(tapped)
