"""Hooks that stay outside of compiled code, which would neither wait for other ranks nor record the times of waits.

module(x)             before | forward | after           registered hooks
compiled module(x)    before | compiled region | after   around the region, because it contains registered hooks
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from muster.ddp.compiler import outside


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


class OutsideHook(Hook):
    """A module hook that runs outside of compiled code, even if its module was compiled after it was registered."""

    def __call__(self, *given: Any) -> Any:
        """Call the wrapped function."""
        return outside(super().__call__, *given)


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of a module run compiled code, by `module.compile()` or by `torch.compile`."""
    return module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")


def within_compiled(module: nn.Module) -> set[int]:
    """Return the ids of all parts of compiled parts of a module. The outermost compiled code contains their calls."""
    compiled = [part for part in module.modules() if is_compiled(part)]
    return {id(part) for whole in compiled for part in whole.modules() if part is not whole}


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
    module: nn.Module,
    before: Callable[..., Any],
    after: Callable[..., Any] | None = None,
    *,
    kind: type[Hook] = Hook,
    is_within: bool = False,
) -> Iterator["RemovableHandle | Around"]:
    """Call `before(module, inputs)` and `after(module, inputs, outputs)` around calls of a module; yield handles.

    `kind` is the class of the hooks of a module that is not compiled, or is within one that is.
    """
    if module._compiled_call_impl is not None and not is_within:
        yield Around(module, before, after)
        return
    yield module.register_forward_pre_hook(kind(before), prepend=True)
    if after is not None:
        yield module.register_forward_hook(kind(after))
