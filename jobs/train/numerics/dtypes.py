"""Determine the dtypes of each layer under a precision, by observing one forward and backward.

Autocast casts by operation: products in 16 bits, sums and losses in 32. The choice differs between devices (a layer
norm is float32 on CUDA and 16 bits on a CPU), so the table is measured rather than hard-coded.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from muster.jobs.train.models.stack import LayerStack, in_turn, mean_loss
from muster.jobs.train.numerics.numerics import Numerics

NONE: Final = "-"


@dataclass(frozen=True)
class DtypeRow:
    """The dtypes of one layer without child modules, or of the loss. `-` means no tensor, or a layer not called."""

    layer: str
    kind: str
    parameters: str
    input: str
    output: str
    gradients: str


def dtype_rows(model: nn.Module, inputs: Tensor, targets: Tensor, numerics: Numerics) -> list[DtypeRow]:
    """Run forward and backward once, layer by layer; the gradients are removed afterwards."""
    seen: dict[str, tuple[str, str]] = {}
    leaves = {name: module for name, module in model.named_modules() if not any(True for _ in module.children())}
    with ExitStack() as hooks:
        for name, module in leaves.items():
            hooks.callback(module.register_forward_hook(_watch(name, seen)).remove)
        with numerics.forward():
            # Compiled pieces of a model skip hooks, and its loss may not compute logits.
            logits = in_turn(list(model), inputs) if isinstance(model, LayerStack) else model(inputs)
            loss = mean_loss(logits, targets)
        torch.autograd.backward(loss)
    rows = []
    for name, module in leaves.items():
        parameters = list(module.parameters(recurse=False))
        gradients = [each.grad for each in parameters if each.grad is not None]
        own, theirs = (_spell(tensors) for tensors in (parameters, gradients))
        rows.append(DtypeRow(name, type(module).__name__, own, *seen.get(name, (NONE, NONE)), theirs))
    model.zero_grad(set_to_none=True)
    return [*rows, DtypeRow("loss", "cross entropy", NONE, _spell([logits]), _spell([loss]), NONE)]


def _watch(name: str, seen: dict[str, tuple[str, str]]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        seen[name] = (_spell(inputs), _spell([output]))

    return hook


def _spell(values: Sequence[Any]) -> str:
    """List the dtypes of tensors, each once."""
    names = dict.fromkeys(str(each.dtype).removeprefix("torch.") for each in values if isinstance(each, Tensor))
    return ", ".join(names) or NONE
