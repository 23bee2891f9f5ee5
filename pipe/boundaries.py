"""Shapes of the tensors that cross a model's cuts, and costs of its layers, from which `balanced` finds the cuts.

    boundary_sizes(vgg16, (32, 3, 32, 32), 2)      [((32, 256, 8, 8), (32, 256, 8, 8))]
    weights_of(vgg16, "flops", (32, 3, 32, 32))    one number per layer, for `pipe.schedules.cuts.balanced`

Shapes and operation counts come from a dummy forward on PyTorch's meta device, whose tensors have a shape and a type,
but no memory. The parameters, buffers, gradients and random state of the real layers do not change.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call

from muster.pipe.layer_times import layer_seconds
from muster.pipe.schedules.cuts import by_hand, even

By = Literal["count", "parameters", "flops", "profile"]
META: Final = torch.device("meta")


def boundary_sizes(
    layers: nn.Sequential, input_size: Sequence[int], stages: int | Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...] | None]]:
    """Return the shapes of the activation and its gradient at every cut, first to last. The list is empty for one
    stage.

    For a batch of B samples and P stages that each send N bytes per sample, the forward sends (P - 1) * B * N bytes,
    whatever the number of layers. The backward sends as many bytes of gradients. If integers such as token ids cross a
    cut, the gradient's shape is None.

    Args:
        layers: the whole model, on any device. Its inputs are integers if its first parameters belong to an embedding;
            else they have the type of the first parameters.
        input_size: shape of a batch, such as (32, 3, 32, 32) for images or (32, 128) for tokens.
        stages: the number of stages, cut evenly by layer count; or their first layers, as in `pipe.schedules.cuts`.

    Raises:
        ValueError: If the cuts are invalid, or a layer fails on its input or returns no tensor.
    """
    if isinstance(stages, int):
        cuts = even(len(layers), stages)
    else:
        cuts = by_hand(stages, len(layers), len(stages) + (tuple(stages[:1]) != (0,)))
    with torch.no_grad():
        crossing = [x for index, x in enumerate(_entering(layers, input_size)) if index in cuts[1:]]
    return [(tuple(x.shape), tuple(x.shape) if _has_gradient(x) else None) for x in crossing]


def weights_of(layers: nn.Sequential, by: By, input_size: Sequence[int] | None = None) -> list[float]:
    """Return the cost of every layer, for `pipe.schedules.cuts.balanced`.

    Args:
        layers: the whole model.
        by: `count` (1 each); `parameters` (a parameter shared by several layers counts in each); `flops` (floating
            point operations of matrix products and convolutions in a dummy forward and backward, counted by
            `torch.utils.flop_counter`); or `profile` (seconds of a forward and a backward on the layers' device, the
            shortest of several measurements; gradients, buffers and random state do not change).
        input_size: shape of a micro-batch, required for `flops` and `profile`. The profile uses inputs of
            ones, or distinct token ids.

    Raises:
        ValueError: If `by` is unknown, a required size is missing, or a layer fails.
    """
    if by not in get_args(By):
        raise ValueError(f"weights by {by!r}: expected one of {', '.join(get_args(By))}")
    if by == "count":
        return [1.0] * len(layers)
    if by == "parameters":
        return [float(sum(each.numel() for each in layer.parameters())) for layer in layers]
    if input_size is None:
        raise ValueError(
            f"weights by {by} require input_size: pass the shape of a micro-batch, such as (32, 3, 32, 32)"
        )
    if by == "flops":
        return _flops(layers, input_size)
    return layer_seconds(layers, _sample(layers, input_size))


def _flops(layers: nn.Sequential, input_size: Sequence[int]) -> list[float]:
    """Count the operations of every layer, forward and backward. The model's input gets no gradient."""
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton where there is one: 0.4 s of CPU time

    totals, x = [], _dummy(layers, input_size)
    for name, layer in _named_layers(layers):
        with FlopCounterMode(display=False) as counter, _named(name, x), torch.enable_grad():
            y = _forward(layer, x.clone())  # a copy, because a layer may write to its input
            if y.requires_grad:
                torch.autograd.backward(y, torch.empty_like(y))
        totals.append(float(counter.get_total_flops()))
        x = y.detach().requires_grad_(_has_gradient(y))
    return totals


def _has_gradient(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _entering(layers: nn.Sequential, input_size: Sequence[int]) -> Iterator[Tensor]:
    """Yield the input of every layer."""
    x = _dummy(layers, input_size)
    for name, layer in _named_layers(layers):
        yield x
        with _named(name, x):
            x = _forward(layer, x)


def _forward(layer: nn.Module, x: Tensor) -> Tensor:
    """Run a layer on the meta device, with meta copies of its parameters and buffers."""
    stand_ins = {
        name: torch.empty_like(each, device=META).requires_grad_(each.requires_grad)
        for named in (layer.named_parameters(), layer.named_buffers())
        for name, each in named
    }
    with META:  # so that layers create new tensors, such as positions, on the meta device
        y = functional_call(layer, stand_ins, (x,))
    if not isinstance(y, Tensor):
        raise TypeError(f"it returns a {type(y).__name__}; only a tensor can be passed from layer to layer")
    return y


@contextmanager
def _named(name: str, x: Tensor) -> Iterator[None]:
    """Turn errors into a ValueError that names the layer and its input."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        given = f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        raise ValueError(f"layer {name!r} failed on a dummy input of {given}: {reason}") from error


def _named_layers(layers: nn.Sequential) -> Iterator[tuple[str, nn.Module]]:
    """Yield every layer with its name. `named_children` would skip a layer that occurs twice."""
    return zip(layers._modules, layers, strict=True)


def _dummy(layers: nn.Sequential, input_size: Sequence[int]) -> Tensor:
    if not len(layers):
        raise ValueError("the model has no layers; expected at least one")
    return torch.empty(*input_size, dtype=_input_type(layers), device=META)


def _sample(layers: nn.Sequential, input_size: Sequence[int]) -> Tensor:
    """Return a micro-batch to measure with. Token ids differ, because equal ids would all add to one row's gradient."""
    first = next(_with_parameters(layers), None)
    device = next((each.device for each in layers.parameters()), torch.device("cpu"))
    dtype = _input_type(layers)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.ones(*input_size, dtype=dtype, device=device)
    ids = first.num_embeddings if isinstance(first, nn.Embedding) else 2
    return (torch.arange(math.prod(input_size), device=device) % ids).view(*input_size).to(dtype)


def _input_type(layers: nn.Sequential) -> torch.dtype:
    first = next(_with_parameters(layers), None)
    if isinstance(first, nn.Embedding):
        return torch.long
    return next((each.dtype for each in layers.parameters()), torch.get_default_dtype())


def _with_parameters(layers: nn.Sequential) -> Iterator[nn.Module]:
    """Yield the modules that own parameters directly, not only through submodules, first to last."""
    for module in layers.modules():
        if next(module.parameters(recurse=False), None) is not None:
            yield module
