"""Mark modules in the profiler's trace: while steps are recorded, every forward of a module is a named range.

The hooks are global, so the model's modules stay unchanged, and a loss that is a module is marked, too. The name of a
range begins with the kind of its module (attention, norm, ...). A module without a kind of its own has the kind of its
parent.
"""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from muster.jobs.spec.recorded import records
from muster.jobs.trace.events import MODULE
from muster.jobs.trace.kinds import OTHER
from muster.jobs.train.memory.held import Held

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings
    from muster.jobs.train.engine import Engine

_CLASSES: Final = (  # patterns for class names: the first match counts; they are tried before those for module names
    ("norm", r"(Layer|RMS|Batch|Group|Instance)Norm|^RMSNorm"),
    ("convolution", r"Conv(Transpose)?\d?d"),
    ("pooling", r"Pool\d?d"),
    ("embedding", r"Embed"),
    ("attention", r"(?i)attention|attn"),
    ("mlp", r"(?i)^mlp|mlp$|feed_?forward"),
    ("loss", r"Loss$"),
)
_NAMES: Final = (
    ("attention", r"attn|attention"),
    ("mlp", r"^mlp|mlp$|^ffn?$|^ffn|feed_?forward|^(linear|fc)\d+$"),
    ("head", r"head$|^classifier$|^unembed"),
    ("embedding", r"embed|^wte$|^wpe$"),
)
COMPILED: Final = "module kinds are unknown: train.compile merges operators of several modules into one kernel"
REPLAYED: Final = "module kinds are unknown: train.cuda_graph replays steps without calling modules"


@dataclass(frozen=True)
class Subject:
    """The profiled model, and a function that lists its parameters, gradients, optimizer state and buffers."""

    module: nn.Module
    held: Callable[[], Held]
    has_last: bool  # whether this rank has the model's last layer; in a pipeline only the last stage does
    note: str = ""  # the reason if modules cannot be marked


def subject_of(engine: "Engine", settings: "TrainSettings") -> Subject:
    """Return the subject of this rank's profile."""
    last = next(reversed(engine.model.whole.pieces), None)
    has_last = engine.stages is None or last in dict(engine.module.named_parameters())
    note = COMPILED if settings.compile else REPLAYED if records(settings, engine.model.world.device.type) else ""
    return Subject(engine.module, engine.held_tensors, has_last, note)


class _Open(threading.local):
    """The open ranges of a thread. On a GPU, the forward of a checkpointed block is repeated on another thread."""

    def __init__(self) -> None:
        self.ranges: list[record_function] = []


class Marks:
    """Hooks that put a range around every forward of a module, from `start` to `stop`."""

    def __init__(self, subject: Subject) -> None:
        self._texts = texts_of(subject.module, has_last=subject.has_last)
        self._open = _Open()
        self._hooks: list[RemovableHandle] = []

    def start(self) -> None:
        """Register the hooks."""
        self._hooks = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]

    def stop(self) -> None:
        """Remove the hooks, if they are registered."""
        while self._hooks:
            self._hooks.pop().remove()

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        text = self._texts.get(module) or text_of(own_kind(module, ""), type(module).__name__)
        opened = record_function(text)
        opened.__enter__()  # type: ignore[no-untyped-call]
        self._open.ranges.append(opened)

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._open.ranges:
            self._open.ranges.pop().__exit__(None, None, None)


def texts_of(model: nn.Module, *, has_last: bool) -> dict[nn.Module, str]:
    """Return the name of each module's range: the module's kind and name.

    A module without a kind of its own has the kind of its parent. The last linear layer is the head, unless its parent
    has another kind.
    """
    kinds: dict[str, str] = {}
    last = ""
    for name, module in model.named_modules():
        around, _, own = name.rpartition(".")
        kinds[name] = OTHER if not name else own_kind(module, own) or kinds.get(around, OTHER)
        if isinstance(module, nn.Linear):
            last = name
    if has_last and last and kinds.get(last.rpartition(".")[0], OTHER) == OTHER:
        kinds[last] = "head"
    named = dict(model.named_modules())
    return {module: text_of(kinds[name], name or type(module).__name__) for name, module in named.items()}


def text_of(kind: str | None, name: str) -> str:
    """Return the name of a module's range."""
    return f"{MODULE}{kind or OTHER} {name}"


def own_kind(module: nn.Module, name: str) -> str | None:
    """Return the kind that matches a module's class, or else its name; None if neither matches a pattern."""
    classes = (kind for kind, pattern in _CLASSES if re.search(pattern, type(module).__name__))
    names = (kind for kind, pattern in _NAMES if re.search(pattern, name.lower()))
    return next(classes, None) or next(names, None)
