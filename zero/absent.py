"""What a parameter is while it is not there: it can be counted and named, and refuses to be read, or waits.

    Absent    its memory is given back (stage 3): to read it would end the process
    Coming    it is being gathered after a step (stages 1 and 2): to read it would bring half of it
    Sent      it is there, its gradient is not: ranks have shared it out (stages 1 and 2)

A parameter's class is another one meanwhile, which PyTorch asks before it does anything with the parameter. Nothing
else changes: it is the same object, and what autograd keeps of it too. PyTorch's functions that clip gradients would
find none and do nothing: Absent and Sent refuse them.
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
_WAITS: Final[MutableMapping[Tensor, _Wait]] = WeakIdKeyDictionary()  # what waits for those coming
_NAMES: Final[MutableMapping[Tensor, str]] = WeakIdKeyDictionary()  # of the parameters that are absent
_LOST: Final[MutableMapping[Tensor, bool]] = WeakIdKeyDictionary()  # those that nobody can gather any more
_TOLD: Final = (
    *("dtype", "device", "grad", "is_cpu", "is_cuda", "is_meta", "is_sparse", "layout", "ndim"),
    *("shape", "requires_grad", "itemsize", "nbytes", "_version", "_backward_hooks", "_post_accumulate_grad_hooks"),
)
_CALLED: Final = (
    *("dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "nelement", "numel", "size"),
    *("stride", "__hash__", "register_hook", "register_post_accumulate_grad_hook"),
)
_HARMLESS: Final = {
    *(getattr(Tensor, name).__get__ for name in _TOLD),
    *(getattr(Tensor, name) for name in _CALLED),
    vars(torch._C.TensorBase)["grad"].__set__,
}
_GRADIENT: Final = vars(torch._C.TensorBase)["grad"]
_CLIPPING: Final = "torch.nn.utils.clip_grad"

as_it_is = torch._C.DisableTorchFunctionSubclass  # within it nobody is asked: for those who know what they touch


class Absent(nn.Parameter):
    """A parameter without memory."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), keywords: Any = None) -> Any:
        """Let it be asked what it is, and nothing else."""
        if function in _HARMLESS:
            if function == _GRADIENT.__get__:
                _refuse_clipping(sys._getframe(1))
            with as_it_is():
                return function(*args, **(keywords or {}))
        raise RuntimeError(_refusal(args, keywords))


class Coming(nn.Parameter):
    """A parameter that is on its way."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), keywords: Any = None) -> Any:
        """Wait for it, which makes it a parameter again, unless it is only asked what it is."""
        if function in _HARMLESS:
            with as_it_is():
                return function(*args, **(keywords or {}))
        for each in _all_of(Coming, args, keywords):
            _wait_for(each)
        with as_it_is():
            return function(*args, **(keywords or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        """Wait, and copy what it is then: PyTorch would ask for the class first."""
        _wait_for(self)
        return copy.deepcopy(self, memo)


class Sent(nn.Parameter):
    """A parameter whose gradient the ranks have shared out."""

    @property
    def grad(self) -> Tensor | None:
        """Return the gradient of this rank alone, if a backward has made one since."""
        _refuse_clipping(sys._getframe(1))
        own: Tensor | None = _GRADIENT.__get__(self)
        return own

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        _GRADIENT.__set__(self, gradient)

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy what it is without a wrapper."""
        memo[id(self)] = copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied


def send(parameters: Sequence[nn.Parameter]) -> None:
    """Let those who clip gradients hear that parameters have none."""
    for parameter in parameters:
        if type(parameter) is nn.Parameter:
            parameter.__class__ = Sent


def unsend(parameters: Sequence[nn.Parameter]) -> None:
    """Make parameters what they were before `send`."""
    for parameter in parameters:
        if type(parameter) is Sent:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def _wait_for(parameter: Any) -> None:
    if type(parameter) is Coming and (wait := _WAITS[parameter]()) is not None:
        wait()


class _Disguise:
    """Some parameters that are of another class for a while."""

    kind: type[nn.Parameter]

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._own = [(parameter, type(parameter)) for parameter in parameters]

    def begin(self) -> None:
        """Make them of that class."""
        for parameter, _ in self._own:
            parameter.__class__ = self.kind

    def end(self) -> None:
        """Make them what they were."""
        for parameter, kind in self._own:
            parameter.__class__ = kind


class Expect(_Disguise):
    """Some parameters, to be coming and to have come; `wait`, a weak reference, ends it for all that are."""

    kind = Coming

    def __init__(self, parameters: Sequence[nn.Parameter], wait: _Wait) -> None:
        super().__init__(parameters)
        for parameter in parameters:
            _WAITS[parameter] = wait


class Leave(_Disguise):
    """A set of parameters, by name, that can be taken off their modules and put back."""

    kind = Absent

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        for name, parameter in zip(names, parameters, strict=True):
            _NAMES[parameter] = name
            _LOST.pop(parameter, None)

    def lose(self) -> None:
        """Hear that nobody will gather them any more."""
        for parameter, _ in self._own:
            _LOST[parameter] = True


def _refuse_clipping(asks: FrameType) -> None:
    """Raise if it is PyTorch that asks for a gradient to clip it, which would find none and do nothing."""
    if asks.f_globals.get("__name__") == _CLIPPING:
        raise RuntimeError(
            f"{_CLIPPING}: parameters of a sharded module have no gradients to clip, each rank has a shard of them; "
            "call optimizer.clip_grad_norm_(max_norm) of the wrapper's optimizer, or change its gradients() in place"
        )


def _refusal(args: Any, keywords: Any) -> str:
    """Say why the first absent parameter among arguments cannot be read, and what to do."""
    absent = next(iter(_all_of(Absent, args, keywords)), None)
    name = "a parameter" if absent is None else _NAMES.get(absent, "a parameter")
    if absent is not None and absent in _LOST:
        return (
            f"{name}: was sharded by a wrapper that is gone, and its parts with it; call the wrapper's unwrap() before "
            "it is deleted, or build the module anew and load a state dict"
        )
    return (
        f"{name}: is sharded, and not gathered here; use it within gather_full(), take state_dict() of the "
        "ShardedDataParallel, step the optimizer that its optimizer() makes, or make what uses this parameter a part "
        "of its unit"
    )


def _all_of(kind: type[nn.Parameter], args: Any, keywords: Any) -> list[Any]:
    """List the parameters of a class among arguments, those in lists too."""
    given, found = [*args, *(keywords or {}).values()], []
    for each in given:  # grows
        if isinstance(each, kind):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            given += each
    return found
