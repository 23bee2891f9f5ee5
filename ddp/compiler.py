"""Code that runs outside of compiled code: it waits for other ranks, records times, or draws random numbers.

PyTorch's own exclusion imports the compiler at the first call, compiled code or not: 900 modules, 1 to 2 s of CPU time
on every rank.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable, it imports the compiler only when needed

_apart = _disable_dynamo(lambda call, *given, **named: call(*given, **named))


def outside(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call a function outside of compiled code. Within compiled code, this causes a graph break.

    After a graph break the compiler also traces functions that run eagerly, so `is_compiling` alone is not enough.
    """
    if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
        return _apart(call, *given, **named)
    return call(*given, **named)
