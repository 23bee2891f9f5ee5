"""Hooks that stay outside of compiled code, which would neither wait for other ranks nor record the times of waits.

module(x)             before | forward | after           registered hooks
compiled module(x)    before | compiled region | after   around the region, because it contains registered hooks
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable, it imports the compiler only when needed
from torch.utils.hooks import RemovableHandle


class Hook:
    """A module hook whose copies do nothing, because `deepcopy` and `pickle` also copy a module's hooks."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *given: Any) -> Any:
        """Call the wrapped function."""
        return self.call(*given)

    def __reduce__(self) -> Any:
        """Copy and pickle as a hook that does nothing."""
        return Hook, (_nothing,)


def _nothing(*given: Any) -> None:
    pass


_apart = _disable_dynamo(lambda call, *given, **named: call(*given, **named))


def outside(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call a function outside of compiled code. Within compiled code, this causes a graph break.

    After a graph break the compiler also traces functions that run eagerly, so `is_compiling` alone is not enough.
    """
    if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
        return _apart(call, *given, **named)
    return call(*given, **named)


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of a module run compiled code, by `module.compile()` or by `torch.compile`."""
    return module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")


class Around:
    """Functions around the compiled call of a module; `remove` restores the call."""

    def __init__(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any] | None) -> None:
        self._module = module
        self._own = module._compiled_call_impl
        self._call = partial(outside, partial(_between, self._own, module, before, after))
        module._compiled_call_impl = self._call

    def remove(self) -> None:
        """Remove the functions, unless the module was compiled again."""
        if self._module._compiled_call_impl is self._call:
            self._module._compiled_call_impl = self._own


def _between(run: Any, module: nn.Module, before: Any, after: Any, *given: Any, **named: Any) -> Any:
    before(module, given)
    outputs = run(*given, **named)
    if after is not None:
        after(module, given, outputs)
    return outputs


def around(
    module: nn.Module, before: Callable[..., Any], after: Callable[..., Any] | None = None
) -> Iterator["RemovableHandle | Around"]:
    """Call `before(module, inputs)` and `after(module, inputs, outputs)` around calls of a module; yield handles."""
    if module._compiled_call_impl is not None:
        yield Around(module, before, after)
        return
    yield module.register_forward_pre_hook(Hook(before), prepend=True)
    if after is not None:
        yield module.register_forward_hook(Hook(after))
