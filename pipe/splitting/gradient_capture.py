"""Gradient capture: a hook on a split layer's output that keeps the two tensors needed for its weight gradients.

    y = linear(x)       its weights are detached                capture(y, CaptureHook(site, weight, bias, x))
    dY is computed      the hook passes (x, dY) to the layer's site, which passes them to the queue

If the input needs no gradient, the output is connected to the site's anchor, because without a graph there would be no
backward and no call of the hook.
"""

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from muster.pipe.splitting.weight_gradients import GradientKind, PendingGradients, PendingQueue

# True if the running backward has retain_graph=True
_keeps_graph: Final = torch._C._autograd._get_current_graph_task_keep_graph
_saving_hooks: Final = torch._C._autograd._top_saved_tensors_default_hooks  # set by activation checkpointing
_OURS: Final = -1  # Muster's key in a tensor's table of hooks; torch's own keys count from 0


class SplitSite:
    """The link between a split layer and its queue."""

    __slots__ = ("__weakref__", "_queue", "anchor", "kind", "module", "original")

    def __init__(self, weight_queue: PendingQueue, kind: GradientKind, module: nn.Module) -> None:
        self._queue = weakref.ref(weight_queue)  # weak, because a deleted queue restores its layers
        self.kind = kind
        self.module = weakref.ref(module)
        self.original = type(module)
        self.anchor = torch.empty(0, requires_grad=True)  # connects outputs to the graph if inputs need no gradient

    def keep(self, work: PendingGradients) -> None:
        """Pass the pending gradients of one call of the layer to the queue."""
        weight_queue = self._queue()
        if weight_queue is None:
            raise RuntimeError(
                "the backward of a split layer ran after its WeightQueue was deleted; keep a reference to the queue"
            )
        weight_queue.keep(work)

    def keep_copies(self, x: Tensor, gradient: Tensor) -> None:
        """Copy the tensors of one call in compiled code, and pass them to the queue."""
        module = self.module()
        assert module is not None
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        learning = bias if bias is not None and bias.requires_grad else None
        self.keep(PendingGradients(self.kind, weight, learning, x.clone(), gradient.clone()))

    def of_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the input."""
        return self.kind.of_input(gradient, x, weight)


class CaptureHook:
    """A hook on the output of a layer. It passes the layer's input and the gradient of the output to the queue."""

    __slots__ = ("bias", "site", "unpack", "version", "weight", "x")

    def __init__(self, site: SplitSite, weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor) -> None:
        self.site = site
        self.weight = weight
        self.bias = bias if bias is not None and bias.requires_grad else None
        self.version = x._version
        self.unpack: Callable[[Any], Tensor] | None = None
        self.x: Any = x
        if hooks := _saving_hooks(True):
            with torch.no_grad():  # activation checkpointing and offloading replace x by another object
                self.x, self.unpack = hooks[0](x.detach()), hooks[1]

    def __call__(self, gradient: Tensor) -> None:
        """Check that the input is unchanged, and pass the input and the output's gradient to the queue."""
        x, site = self.x, self.site
        if gradient.requires_grad:
            raise RuntimeError("a split backward cannot be differentiated; use a plain layer for create_graph=True")
        if x is None:
            raise RuntimeError("a split backward ran twice; pass retain_graph=True to the first one")
        if self.unpack is not None:
            x = self.unpack(x)
        elif x._version != self.version:
            raise RuntimeError(
                f"the input {tuple(x.shape)} of a split layer was changed in place after its forward (version "
                f"{x._version}, expected {self.version}), but the gradient of its weight needs it unchanged"
            )
        if not _keeps_graph():
            self.x = None
        # Unlike `x`, `x.data` does not keep the graph alive.
        site.keep(PendingGradients(site.kind, self.weight, self.bias, x.data, gradient))


class _Hooks(dict[int, Callable[[Tensor], Any]]):
    """A tensor's table of hooks: a dict that supports the weak references held by handles of hooks."""

    __slots__ = ("__weakref__",)


class Anchored(torch.autograd.Function):
    """An operation that connects an output to the graph even if its input needs no gradient."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], arguments: tuple[Any, ...], anchor: Tensor) -> Tensor:
        return run(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        return None, None, None


def capture(y: Tensor, hook: CaptureHook) -> None:
    """Register the hook, to be called with the gradient of a layer's output.

    A linear layer's output may be a view of (rows, outputs). An in-place operation removes the view's node from the
    graph, but not the node of its base.
    """
    captured = y if y._base is None else y._base
    # This does what register_hook does, without a handle and in a third of the time.
    captured._backward_hooks = _Hooks({_OURS: hook})
    node: Any = captured.grad_fn
    node._register_hook_dict(captured)
