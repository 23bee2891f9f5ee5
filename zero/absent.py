"""What a parameter is while its memory is given back: it can be counted and named, and refuses to be read.

To read freed memory would end the process. So a parameter's class is another one meanwhile, which PyTorch asks before
it does anything with the parameter. Nothing else changes: it is the same object, and what autograd keeps of it too.
"""

from collections.abc import MutableMapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

_NAMES: Final[MutableMapping[Tensor, str]] = WeakIdKeyDictionary()  # of the parameters that are absent
_TOLD: Final = (
    *("dtype", "device", "grad", "is_cpu", "is_cuda", "is_meta", "is_sparse", "layout", "ndim"),
    *("shape", "requires_grad", "itemsize", "nbytes", "_version", "_backward_hooks", "_post_accumulate_grad_hooks"),
)
_CALLED: Final = (
    *("dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "nelement", "numel", "size"),
    *("stride", "__hash__", "register_post_accumulate_grad_hook"),
)
_HARMLESS: Final = {
    *(getattr(Tensor, name).__get__ for name in _TOLD),
    *(getattr(Tensor, name) for name in _CALLED),
    vars(torch._C.TensorBase)["grad"].__set__,
}

as_it_is = torch._C.DisableTorchFunctionSubclass  # within it nobody is asked: for those who know what they touch


class Absent(nn.Parameter):
    """A parameter without memory."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), keywords: Any = None) -> Any:
        """Let it be asked what it is, and nothing else."""
        if function in _HARMLESS:
            with as_it_is():
                return function(*args, **(keywords or {}))
        raise RuntimeError(
            f"{_named(args, keywords)}: is sharded, and not gathered here; use it within gather_full(), take "
            "state_dict() of the ShardedDataParallel, step the optimizer that its optimizer() makes, or make what uses "
            "this parameter a part of its unit"
        )


class Leave:
    """The names and classes of some parameters, to be absent and to come back."""

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        self._kinds = [(parameter, type(parameter)) for parameter in parameters]
        for name, parameter in zip(names, parameters, strict=True):
            _NAMES[parameter] = name

    def take(self) -> None:
        """Let nobody read them."""
        for parameter, _ in self._kinds:
            parameter.__class__ = Absent

    def end(self) -> None:
        """Make them what they were."""
        for parameter, kind in self._kinds:
            parameter.__class__ = kind


def _named(args: Any, keywords: Any) -> str:
    """Name the first absent parameter among arguments."""
    given = [*args, *(keywords or {}).values()]
    for each in given:
        if isinstance(each, Absent):
            return _NAMES.get(each, "a parameter")
        if isinstance(each, (list, tuple)):
            given += each
    return "a parameter"
