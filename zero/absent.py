"""Placeholder classes for parameters that are not available. Their metadata can be read. Reading their data raises an
error or waits.

    Absent    its memory is freed (stage 3); reading it would crash the process
    Coming    it is being gathered after a step (stages 1 and 2); reading it would return partial data
    Sent      it is available, but its gradient is sharded (stages 1 and 2)

In each of these states, the parameter has the class of that name. PyTorch calls the `__torch_function__` of the class
before any operation. The parameter stays the same object, also for autograd. PyTorch's gradient clipping would find no
gradients and do nothing, so Absent and Sent make the clipping raise an error.
"""

import copy
import sys
from collections.abc import Callable, MutableMapping, Sequence
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

_Wait = Callable[[], Callable[[], None] | None]
_WAITS: Final[MutableMapping[Tensor, _Wait]] = WeakIdKeyDictionary()  # by parameter
_NAMES: Final[MutableMapping[Tensor, str]] = WeakIdKeyDictionary()  # names of absent parameters
_LOST: Final[MutableMapping[Tensor, bool]] = WeakIdKeyDictionary()  # parameters that can never be gathered again
_METADATA: Final = (
    *("dtype", "device", "grad", "is_cpu", "is_cuda", "is_meta", "is_sparse", "layout", "ndim"),
    *("shape", "requires_grad", "itemsize", "nbytes", "_version", "_backward_hooks", "_post_accumulate_grad_hooks"),
)
_METADATA_METHODS: Final = (
    *("dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "nelement", "numel", "size"),
    *("stride", "__hash__", "register_hook", "register_post_accumulate_grad_hook"),
)
_HARMLESS: Final = {
    *(getattr(Tensor, name).__get__ for name in _METADATA),
    *(getattr(Tensor, name) for name in _METADATA_METHODS),
    vars(torch._C.TensorBase)["grad"].__set__,
}
_GRADIENT: Final = vars(torch._C.TensorBase)["grad"]
_CLIPPING: Final = "torch.nn.utils.clip_grad"

as_it_is = torch._C.DisableTorchFunctionSubclass  # context for internal access, without the checks of these classes


class Absent(nn.Parameter):
    """A parameter without memory."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), keywords: Any = None) -> Any:
        """Allow only metadata to be read."""
        if function in _HARMLESS:
            if function == _GRADIENT.__get__:
                _refuse_clipping(sys._getframe(1))
            with as_it_is():
                return function(*args, **(keywords or {}))
        raise RuntimeError(_refusal(args, keywords))


class Coming(nn.Parameter):
    """A parameter that is being gathered."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), keywords: Any = None) -> Any:
        """Wait for the parameter, unless only metadata is read. Waiting restores the parameter's class."""
        if function in _HARMLESS:
            with as_it_is():
                return function(*args, **(keywords or {}))
        for each in _all_of(Coming, args, keywords):
            _wait_for(each)
        with as_it_is():
            return function(*args, **(keywords or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        """Wait for the parameter, which restores its class, so that the copy has that class, too."""
        _wait_for(self)
        return copy.deepcopy(self, memo)


class Sent(nn.Parameter):
    """A parameter whose gradient is sharded over the ranks."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient from this rank alone, if a backward has computed one since the last synchronization."""
        _refuse_clipping(sys._getframe(1))
        own: Tensor | None = _GRADIENT.__get__(self)
        return own

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        _GRADIENT.__set__(self, gradient)

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy as a plain parameter."""
        memo[id(self)] = copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied


def send(parameters: Sequence[nn.Parameter]) -> None:
    """Make PyTorch's gradient clipping raise an error for these parameters, because their gradients are sharded."""
    for parameter in parameters:
        if type(parameter) is nn.Parameter:
            parameter.__class__ = Sent


def unsend(parameters: Sequence[nn.Parameter]) -> None:
    """Undo `send`."""
    for parameter in parameters:
        if type(parameter) is Sent:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def _wait_for(parameter: Any) -> None:
    if type(parameter) is Coming and (wait := _WAITS[parameter]()) is not None:
        wait()


class _Disguise:
    """Parameters that temporarily have another class."""

    kind: type[nn.Parameter]

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._own = [(parameter, type(parameter)) for parameter in parameters]

    def begin(self) -> None:
        """Set the temporary class, `kind`."""
        for parameter, _ in self._own:
            parameter.__class__ = self.kind

    def end(self) -> None:
        """Restore the original classes."""
        for parameter, kind in self._own:
            parameter.__class__ = kind


class Expect(_Disguise):
    """Parameters that are being gathered. `wait` is a weak reference to a function that completes the gather."""

    kind = Coming

    def __init__(self, parameters: Sequence[nn.Parameter], wait: _Wait) -> None:
        super().__init__(parameters)
        for parameter in parameters:
            _WAITS[parameter] = wait


class Leave(_Disguise):
    """Parameters that have the class Absent while their memory is freed. `names` are used in error messages."""

    kind = Absent

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        for name, parameter in zip(names, parameters, strict=True):
            _NAMES[parameter] = name
            _LOST.pop(parameter, None)

    def lose(self) -> None:
        """Mark the parameters as lost: they will never be gathered again."""
        for parameter, _ in self._own:
            _LOST[parameter] = True


def _refuse_clipping(asks: FrameType) -> None:
    """Raise an error if the caller is PyTorch's gradient clipping, which would find no gradient and do nothing."""
    if asks.f_globals.get("__name__") == _CLIPPING:
        raise RuntimeError(
            f"{_CLIPPING}: parameters of a sharded module have no gradients to clip, because each rank has a shard; "
            "call clip_grad_norm_(max_norm) of the wrapper's optimizer, or change its gradients() in place"
        )


def _refusal(args: Any, keywords: Any) -> str:
    """Explain why the first absent parameter among the arguments cannot be read, and what to do."""
    absent = next(iter(_all_of(Absent, args, keywords)), None)
    name = "a parameter" if absent is None else _NAMES.get(absent, "a parameter")
    if absent is not None and absent in _LOST:
        return (
            f"{name}: the wrapper that sharded it was deleted, and its values are lost; call the wrapper's unwrap() "
            "before deleting it, or build the module again and load a state dict"
        )
    return (
        f"{name}: it is sharded and not gathered here; use it within gather_full(), call state_dict() of the "
        "ShardedDataParallel, step the optimizer that its optimizer() returns, or put the module that uses this "
        "parameter into the parameter's unit"
    )


def _all_of(kind: type[nn.Parameter], args: Any, keywords: Any) -> list[Any]:
    """List the parameters of a class among arguments, including those in lists."""
    given, found = [*args, *(keywords or {}).values()], []
    for each in given:  # the list grows within the loop
        if isinstance(each, kind):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            given += each
    return found
