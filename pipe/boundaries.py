"""What crosses the cuts of a model, and what its layers weigh: by a dummy forward that computes nothing.

    boundary_sizes(vgg16, (32, 3, 32, 32), 2)      [((32, 256, 8, 8), (32, 256, 8, 8))]
    weights_of(vgg16, "flops", (32, 3, 32, 32))    one number a layer, for `pipe.schedules.cuts.balanced`

The dummy runs on PyTorch's meta device, whose tensors have a shape and a type and no memory: parameters, buffers,
gradients and random numbers of the real layers stay as they are, however large the model is.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from muster.pipe.layer_times import layer_seconds
from muster.pipe.schedules.cuts import by_hand, even

By = Literal["count", "parameters", "flops", "profile"]
META: Final = torch.device("meta")


def boundary_sizes(
    layers: nn.Sequential, input_size: Sequence[int], stages: int | Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...] | None]]:
    """Return the shapes of activation and gradient at every cut, first to last; none for one stage.

    Over a batch of B samples the forward sends the sum of the activations: (P - 1) * B * N bytes for P stages where
    each sends N bytes a sample, however many layers there are; the backward the same of the gradients. The gradient is
    None where token ids cross.

    Args:
        layers: the whole model, on any device. Its inputs are whole numbers where the first parameters are those of an
            embedding, else of the type of the first parameters.
        input_size: of a batch, such as (32, 3, 32, 32) for images or (32, 128) for tokens.
        stages: how many, cut evenly by count; or their first layers, as `pipe.schedules.cuts` makes them.

    Raises:
        ValueError: cuts that cannot be, a layer that fails on such an input, or that returns no tensor.
    """
    if isinstance(stages, int):
        cuts = even(len(layers), stages)
    else:
        cuts = by_hand(stages, len(layers), len(stages) + (tuple(stages[:1]) != (0,)))
    with torch.no_grad():
        crossing = [x for index, x in enumerate(_entering(layers, input_size)) if index in cuts[1:]]
    return [(tuple(x.shape), tuple(x.shape) if _has_gradient(x) else None) for x in crossing]


def weights_of(layers: nn.Sequential, by: By, input_size: Sequence[int] | None = None) -> list[float]:
    """Weigh every layer, for `pipe.schedules.cuts.balanced`.

    Args:
        layers: the whole model.
        by: `count` (1 each), `parameters` (a weight that several layers share counts in each), `flops` (floating point
            operations of matrix products and convolutions, forward and backward, as `torch.utils.flop_counter` counts
            them on a dummy), or `profile` (seconds of a forward and a backward, measured on the device that the
            layers are on: least of several; no gradient, buffer or random state changes).
        input_size: of a micro-batch; `flops` and `profile` need it. A profile's is of ones, or token ids that differ.

    Raises:
        ValueError: another way to weigh, no size where one is needed, or a layer that fails.
    """
    if by not in get_args(By):
        raise ValueError(f"weights by {by!r}: wanted one of {', '.join(get_args(By))}")
    if by == "count":
        return [1.0] * len(layers)
    if by == "parameters":
        return [float(sum(each.numel() for each in layer.parameters())) for layer in layers]
    if input_size is None:
        raise ValueError(f"weights by {by}: need input_size, the shape of a micro-batch, such as (32, 3, 32, 32)")
    if by == "flops":
        return _flops(layers, input_size)
    return layer_seconds(layers, _sample(layers, input_size))


def _flops(layers: nn.Sequential, input_size: Sequence[int]) -> list[float]:
    """Count the operations of every layer, forward and backward; the model's input has no gradient."""
    totals, x = [], _dummy(layers, input_size)
    for name, layer in _named_layers(layers):
        with FlopCounterMode(display=False) as counter, _named(name, x), torch.enable_grad():
            y = _forward(layer, x.clone())  # a copy, for a layer may work in place on what it is given
            if y.requires_grad:
                torch.autograd.backward(y, torch.empty_like(y))
        totals.append(float(counter.get_total_flops()))
        x = y.detach().requires_grad_(_has_gradient(y))
    return totals


def _has_gradient(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _entering(layers: nn.Sequential, input_size: Sequence[int]) -> Iterator[Tensor]:
    """Yield what enters every layer."""
    x = _dummy(layers, input_size)
    for name, layer in _named_layers(layers):
        yield x
        with _named(name, x):
            x = _forward(layer, x)


def _forward(layer: nn.Module, x: Tensor) -> Tensor:
    """Run a layer on the meta device, with stand-ins for its parameters and buffers."""
    stand_ins = {
        name: torch.empty_like(each, device=META).requires_grad_(each.requires_grad)
        for named in (layer.named_parameters(), layer.named_buffers())
        for name, each in named
    }
    with META:  # where a layer makes tensors of its own, such as positions
        y = functional_call(layer, stand_ins, (x,))
    if not isinstance(y, Tensor):
        raise TypeError(f"it returns a {type(y).__name__}: only a tensor can go from layer to layer")
    return y


@contextmanager
def _named(name: str, x: Tensor) -> Iterator[None]:
    """Say which layer failed, and on what."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        given = f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        raise ValueError(f"layer {name!r}: cannot forward a dummy input of {given}: {reason}") from error


def _named_layers(layers: nn.Sequential) -> Iterator[tuple[str, nn.Module]]:
    """Yield every layer with its name; `named_children` would leave out one that is there twice."""
    return zip(layers._modules, layers, strict=True)


def _dummy(layers: nn.Sequential, input_size: Sequence[int]) -> Tensor:
    if not len(layers):
        raise ValueError("layers: there are none")
    return torch.empty(*input_size, dtype=_input_type(layers), device=META)


def _sample(layers: nn.Sequential, input_size: Sequence[int]) -> Tensor:
    """Make a micro-batch to measure with: token ids that differ, for equal ones would all add to one row's gradient."""
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
    """Yield modules that have parameters of their own, first to last."""
    for module in layers.modules():
        if next(module.parameters(recurse=False), None) is not None:
            yield module
