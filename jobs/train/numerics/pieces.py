"""Run a stack's body in pieces during training. Each piece is compiled, or recomputed in the backward to save memory.

    embed | block1 | block2 | norm        conv1 norm1 relu1 pool1 | conv2 norm2 relu2 pool2 | ...

With pieces, gradients of late layers can be sent while early ones are computed, and twelve equal blocks are compiled
only once. Only the input of a recomputed piece is kept. When it runs again, batch norms use the batch's statistics
again, but do not record them a second time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from muster.jobs.basics.errors import RefusedError
from muster.jobs.machine.compilers import lacking
from muster.jobs.train.models.gpt import Embed, TransformerBlock
from muster.jobs.train.models.stack import Layers, LayerStack, in_turn

FIRST_OF_PIECE: Final = (Embed, TransformerBlock, nn.Conv2d, nn.Linear, nn.LayerNorm, nn.RMSNorm)
AGAIN: Final = (TransformerBlock, nn.Conv2d, nn.Linear)  # pieces that start with one of these are recomputed

Run = Callable[[Layers, Tensor], Tensor]


@dataclass(frozen=True)
class LayerRange:
    """Layers [start, stop) of a body; with `again`, they may be recomputed."""

    start: int
    stop: int
    again: bool


def cut(body: Layers) -> list[LayerRange]:
    """Cut a body into pieces that are compiled or recomputed separately."""
    starts = [index for index, layer in enumerate(body) if index == 0 or isinstance(layer, FIRST_OF_PIECE)]
    stops = [*starts[1:], len(body)]
    return [LayerRange(a, b, isinstance(body[a], AGAIN)) for a, b in zip(starts, stops, strict=True)]


class Body:
    """A function that runs the pieces of a body. It has no reference to layers, so that the model can be copied."""

    def __init__(self, model: LayerStack, *, compile: bool, recompute: bool) -> None:
        body = list(model)[:-1]
        self.pieces = cut(body)
        self.recompute = recompute
        self.draws = any(isinstance(module, nn.Dropout) and module.p > 0.0 for module in model.modules())
        runs: dict[str, Run] = {}
        for piece in self.pieces:
            kind = form(body[piece.start : piece.stop])
            if kind not in runs:
                runs[kind] = compiled(in_turn, f"piece{len(runs)}") if compile else in_turn
        self.runs = [runs[form(body[piece.start : piece.stop])] for piece in self.pieces]

    def __call__(self, body: Layers, x: Tensor) -> Tensor:
        """Map the body's input to its output."""
        for piece, run in zip(self.pieces, self.runs, strict=True):
            layers = body[piece.start : piece.stop]
            x = self._again(run, layers, x) if self.recompute and piece.again else run(layers, x)
        return x

    def _again(self, run: Run, layers: Layers, x: Tensor) -> Tensor:
        norms = [module for layer in layers for module in layer.modules() if isinstance(module, _NormBase)]

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            return nullcontext(), discarded_statistics(norms)

        y: Tensor = checkpoint(run, layers, x, use_reentrant=False, preserve_rng_state=self.draws, context_fn=contexts)
        return y


def compile_layers(layers: Layers) -> None:
    """Compile each layer on its own, for training; in place."""
    runs: dict[str, Callable[..., Any]] = {}
    for layer in layers:
        kind = form([layer])
        if kind not in runs:
            runs[kind] = compiled(_run_layer, f"layer{len(runs)}")
        layer._compiled_call_impl = partial(_in_training, runs[kind], layer)


def _in_training(run: Callable[..., Any], layer: nn.Module, x: Tensor) -> Any:
    return (run if layer.training else _run_layer)(layer, x)


def _run_layer(layer: nn.Module, x: Tensor) -> Any:
    return layer._call_impl(x)  # type: ignore[no-untyped-call]


def by_units(model: nn.Module, units: Sequence[Sequence[nn.Module]], *, compile: bool, recompute: bool) -> None:
    """Compile each unit of a user's model, or recompute it in the backward to save memory; in place.

    Raises:
        RefusedError: if there is no unit to recompute.
    """
    layers = [layer for unit in units for layer in unit]
    if recompute and not layers:
        raise RefusedError(
            f"train.activation_checkpointing: found no repeated children in {type(model).__name__}; name the modules "
            "to recompute in model.units, or set activation_checkpointing: false"
        )
    runs: dict[str, Callable[..., Any]] = {}
    for layer in layers:
        if recompute:  # what is recomputed is compiled; the compiler does not support `context_fn`
            forward, kind = layer.forward, form([layer])
            if compile:
                runs[kind] = runs.get(kind) or compiled(_run_forward, f"unit{len(runs)}")
                forward = partial(runs[kind], forward)
            layer.forward = partial(_forward_again, forward, layer)
        elif compile:
            layer.compile()
    if compile and not layers:
        model.compile()


def _run_forward(forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return forward(*given, **named)


def _forward_again(forward: Callable[..., Any], layer: nn.Module, *given: Any, **named: Any) -> Any:
    if not (layer.training and torch.is_grad_enabled()):
        return forward(*given, **named)
    norms = [module for module in layer.modules() if isinstance(module, _NormBase)]

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), discarded_statistics(norms)

    return checkpoint(forward, *given, use_reentrant=False, context_fn=contexts, **named)


@contextmanager
def discarded_statistics(norms: Sequence[_NormBase]) -> Iterator[None]:
    """Make batch norms record running statistics in temporary copies, which are discarded."""
    before = [dict(norm._buffers) for norm in norms]
    for norm, buffers in zip(norms, before, strict=True):
        norm._buffers.update({name: None if each is None else each.clone() for name, each in buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, before, strict=True):
            norm._buffers.update(buffers)


def form(layers: Layers) -> str:
    """Describe the kind and sizes of layers; pieces with the same description share compiled code."""
    return "\n".join(map(repr, layers))


def compiled(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Compile a copy of a function, under a name of its own.

    torch.compile caches by code object, and after a second argument shape it compiles slower code for all shapes. So
    layers of two sizes need two code objects.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{name}")
    own = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    run: Callable[..., Any] = torch.compile(own)
    return run


def require_compiler(device: torch.device) -> None:
    """Check that generated code can be built for a device.

    Raises:
        RefusedError: if this machine lacks a compiler or Python's headers.
    """
    if need := lacking(device.type):
        raise RefusedError(f"train.compile: torch.compile for {device.type} needs {need}, or set compile: false")
