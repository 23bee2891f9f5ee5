"""Linear layers whose columns or rows are split over ranks (Shoeybi et al. 2019, Megatron-LM).

    y = x W^T             W is (outputs, inputs), as in PyTorch
    column    outputs are split      whole x -> each rank's outputs                    backward: dx is summed
    row       inputs are split       each rank's inputs -> y, summed                   backward: dy whole, nothing sent

A column layer, an elementwise operation and a row layer need one exchange forward and one backward. With split
sequences (Korthikanti et al. 2022), the column layer gathers and the row layer scatters in the forward; in the backward
the column layer scatters and the row layer gathers. Together they send as many bytes as an all-reduce.

In the backward of column layers, dx is sent while the product for dW runs. Layers with the same input share one matrix
product and one sum over ranks, if possible. If a pipeline computes dW later (`pipe/splitting/halves.py`), dx is still
sent first.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from muster.ddp.compiler import outside
from muster.pipe.splitting.weight_gradients import LINEAR, PendingGradients, PendingQueue
from muster.pipe.tensor.region import Pending, Region


class ColumnLinear(nn.Linear):
    """A linear layer that maps (..., in_features) to (..., outputs of this rank).

    With split sequences, its input is this rank's part of the sequence, and its outputs belong to the whole sequence.
    """

    region: Region
    # The queue that computes the layer's weight gradients later. If None, the backward computes them.
    weight_queue: PendingQueue | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Map whole inputs to this rank's outputs."""
        return columns([self], input)[0]


class RowLinear(nn.Linear):
    """A linear layer that maps (..., inputs of this rank) to (..., out_features), summed over the ranks.

    Every rank has the whole bias, which is added once. With split sequences, the result is this rank's part of the
    sequence.
    """

    region: Region
    weight_queue: PendingQueue | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Map this rank's inputs to whole outputs."""
        later = [later_of(self, input)]
        given = autocast_to(input, *_in_graph([self.weight, self.bias], later))
        return cast(Tensor, outside(_Row.apply, self.region, later[0], *given))


class Later(NamedTuple):
    """The queue that computes a layer's weight gradients after the backward."""

    weight_queue: PendingQueue
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __call__(self, x: Tensor, gradient: Tensor) -> None:
        """Pass the layer's input and the gradient of its output to the queue."""
        self.weight_queue.keep(PendingGradients(LINEAR, self.weight, self.bias, x, gradient))


def columns(layers: Sequence[ColumnLinear], x: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs of column layers with the same input: one exchange, and one product if possible."""
    later = [later_of(layer, x) for layer in layers]
    given = [*(layer.weight for layer in layers), *(layer.bias for layer in layers)]
    given = autocast_to(x, *_in_graph(given, later))
    return cast(tuple[Tensor, ...], outside(_Columns.apply, layers[0].region, later, *given))


def later_of(layer: ColumnLinear | RowLinear, x: Tensor) -> Later | None:
    """Return the queue that computes a layer's weight gradients later; None if its backward computes them."""
    learns = layer.weight.requires_grad and x.requires_grad and torch.is_grad_enabled()
    if layer.weight_queue is None or not learns:
        return None
    bias = cast(nn.Parameter | None, layer.bias)
    return Later(
        layer.weight_queue, cast(nn.Parameter, layer.weight), bias if bias is not None and bias.requires_grad else None
    )


def _in_graph(given: Sequence[Tensor | None], later: Sequence[Later | None]) -> list[Tensor | None]:
    """Detach the weights whose gradients are computed later."""
    kept = [later[place % len(later)] is not None for place in range(len(given))]
    return [each.detach() if each is not None and out else each for each, out in zip(given, kept, strict=True)]


class JoinedColumns:
    """A call that replaces a method of a module, and runs several of its column layers with the same input."""

    def __init__(self, layers: Sequence[ColumnLinear]) -> None:
        self.layers = list(layers)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map the input to every layer's outputs."""
        return columns(self.layers, x)


def autocast_to(x: Tensor, *rest: Tensor | None) -> list[Any]:
    """If autocast is on, cast tensors as it does for a matrix product."""
    if not torch.is_autocast_enabled(x.device.type):
        return [x, *rest]
    dtype = torch.get_autocast_dtype(x.device.type)
    return [each if each is None or each.dtype == torch.float64 else each.to(dtype) for each in (x, *rest)]


class _Columns(torch.autograd.Function):
    """Map x, the layers' weights, and their biases (or None) to each layer's outputs."""

    @staticmethod
    def forward(
        ctx: Any, region: Region, later: Sequence[Later | None], x: Tensor, *given: Tensor | None
    ) -> tuple[Tensor, ...]:
        count = len(later)
        weights, biases = cast(Sequence[Tensor], given[:count]), given[count:]
        ctx.region, ctx.later = region, later
        ctx.save_for_backward(x, *weights)
        whole = region.begin_gather(x)() if region.splits_sequence else x
        joined, bias = side_by_side(weights), side_by_side(biases)
        if joined is None or (bias is None and any(each is not None for each in biases)):
            return tuple(map(functional.linear, [whole] * count, weights, biases))
        return torch.split(functional.linear(whole, joined, bias), [weight.shape[0] for weight in weights], -1)

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        region, later = ctx.region, ctx.later
        region.require_first_order()
        x, *weights = ctx.saved_tensors
        wants_x, wants = ctx.needs_input_grad[2], ctx.needs_input_grad[3:]
        needs_input = any(wants[: len(weights)]) or any(later)
        whole = region.begin_gather(x) if region.splits_sequence and needs_input else lambda: x
        side, joined = of_outputs, side_by_side(weights)
        if joined is not None and len(weights) > 1:
            side = (torch.cat(of_outputs, -1),)
        products = weights if joined is None else [joined]
        of_x = _begin_input_gradient(region, side, products) if wants_x else None
        inputs = whole()
        of_parameters = _weight_gradients(inputs, side, weights, wants)
        for each, of_output in zip(later, of_outputs, strict=True):
            if each is not None:
                each(inputs, of_output)
        return None, None, None if of_x is None else of_x(), *of_parameters


def _weight_gradients(
    inputs: Tensor, side: Sequence[Tensor], weights: Sequence[Tensor], wants: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of weights, then of biases.

    `side` has the gradients of the outputs, joined or one per layer.
    """
    count = len(weights)
    rows = [_rows(each) for each in side]
    of_weights: Sequence[Tensor | None] = [None] * count
    of_biases: Sequence[Tensor | None] = [None] * count
    sizes = [weight.shape[0] for weight in weights]
    if any(wants[:count]):
        made = [each.t() @ _rows(inputs) for each in rows]
        of_weights = made if len(made) == count else torch.split(made[0], sizes)
    if any(wants[count:]):
        sums = [each.sum(0) for each in rows]
        of_biases = sums if len(sums) == count else torch.split(sums[0], sizes)
    return [each if wanted else None for each, wanted in zip([*of_weights, *of_biases], wants, strict=True)]


def _rows(x: Tensor) -> Tensor:
    """View (..., width) as (rows, width); a vector is one row."""
    return x.reshape(-1, x.shape[-1])


def _begin_input_gradient(region: Region, of_outputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Pending:
    """Sum the layers' gradients of their input, and begin the sum over ranks."""
    of_x = of_outputs[0] @ weights[0]
    for of_output, weight in zip(of_outputs[1:], weights[1:], strict=True):
        of_x += of_output @ weight
    return region.begin_scatter_sum(of_x) if region.splits_sequence else region.begin_sum(of_x)


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, region: Region, later: Later | None, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.region, ctx.later = region, later
        ctx.save_for_backward(x, weight)
        y = functional.linear(x, weight, bias if region.rank == 0 else None)  # the sum contains the bias once
        return (region.begin_scatter_sum(y) if region.splits_sequence else region.begin_sum(y))()

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        region, (of_y,) = ctx.region, of_outputs
        region.require_first_order()
        x, weight = ctx.saved_tensors
        if region.splits_sequence:
            of_y = region.begin_gather(of_y)()
        rows = _rows(of_y)
        if ctx.later is not None:
            ctx.later(x, of_y)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[2:]
        of_x = of_y @ weight if wants_x else None
        of_weight = rows.t() @ _rows(x) if wants_weight else None
        # Every rank has the whole dy, so this is the whole gradient of the bias, with the same bits everywhere.
        of_bias = rows.sum(0) if wants_bias else None
        return None, None, of_x, of_weight, of_bias


def side_by_side(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """View tensors that are adjacent in memory as one, joined along dimension 0; None if they are not adjacent."""
    first = tensors[0]
    if first is None or len(tensors) == 1:
        return first
    at, storage, rows = first.storage_offset(), first.untyped_storage()._cdata, 0
    for each in tensors:
        if each is None or each.dtype != first.dtype or each.shape[1:] != first.shape[1:]:
            return None
        if not each.is_contiguous() or each.untyped_storage()._cdata != storage or each.storage_offset() != at:
            return None
        at += each.numel()
        rows += each.shape[0]
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
