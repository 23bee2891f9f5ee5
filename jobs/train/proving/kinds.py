"""The four kinds of classes that `muster verify --with` supports: the call, the methods and the detection of each."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from muster.jobs.basics.errors import RefusedError
from muster.jobs.user import code

KEY: Final = "--with"
BUCKET: Final = "bucket_size_mb"
FULL: Final = "full_state_dict"


@dataclass(frozen=True)
class Kind:
    """A kind of class: the form of its call, and the methods that it needs."""

    name: str
    form: str
    methods: tuple[str, ...] = ()


KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind("wrapper", f"Class(module) or Class(module, {BUCKET})", ("__call__",)),
        Kind("optimizer", "Class(params, optimizer_cls, **options)", ("step", "zero_grad")),
        Kind("sharded", "Class(module)", ("__call__", "parameters", FULL)),
        Kind("pipeline", "Class(layers, microbatches)", ("train_step", "parameters")),
    )
}


@dataclass(frozen=True)
class UserClass:
    """A user's class, its kind, and additional arguments for its call."""

    text: str  # FILE.py:NAME
    kind: Kind
    cls: Callable[..., Any]
    args: Mapping[str, Any]  # from --args

    @property
    def takes_buckets(self) -> bool:
        """True if the class has a parameter for the bucket size."""
        return BUCKET in _parameters(self.cls)

    def build(self, *given: Any, **options: Any) -> Any:
        """Call the class.

        Raises:
            RefusedError: if the class has other parameters or raises, or its instance lacks a method.
        """
        options = {**options, **self.args}
        try:
            signature = inspect.signature(self.cls)
            signature.bind(*given, **options)
        except TypeError as error:
            raise RefusedError(
                f"{KEY}: {self.text} takes {signature}, but verify calls it as {self.kind.form}: {error}; "
                "change the class, pass more parameters with --args '{...}', or choose another kind with --as"
            ) from error
        made = code.called(KEY, self.text, lambda: self.cls(*given, **options))
        lacking = [name for name in self.kind.methods if not callable(getattr(made, name, None))]
        if lacking:
            raise RefusedError(
                f"{KEY}: {self.text} is treated as kind {self.kind.name}, {self.kind.form}, but has no {lacking[0]}; "
                "add it, or choose another kind with --as"
            )
        return made


def load_class(text: str, named: str | None, args: Mapping[str, Any], folder: Path) -> UserClass:
    """Import a user's class and determine its kind.

    Raises:
        RefusedError: if the class cannot be imported, or is not callable.
    """
    cls = code.load(KEY, text, folder)
    if not callable(cls):
        raise RefusedError(f"{KEY}: {text} is of type {type(cls).__name__}; name a class")
    return UserClass(text, KINDS[named or kind_of(cls)], cls, args)


def kind_of(cls: Callable[..., Any]) -> str:
    """Determine the kind of a class from its methods and parameters."""
    if hasattr(cls, "train_step"):
        return "pipeline"
    if "optimizer_cls" in _parameters(cls) or (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        return "optimizer"
    return "sharded" if hasattr(cls, FULL) else "wrapper"


def _parameters(cls: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(cls).parameters
    except (TypeError, ValueError):  # a class in compiled code has no signature; a wrong call will raise
        return {}
