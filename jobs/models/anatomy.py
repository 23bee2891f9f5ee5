"""The anatomy of a model: its tensors, and each part's work and activations kept for the backward. Torch-free.

    parts of VGG    conv1 norm1 relu1 pool1 conv2 ...  resize flatten fc1 relu14 fc2 relu15 head
    parts of GPT    embed  block1: norm1 query key value attention output norm2 up gelu down  block2 ...  norm head

A *part* is one operation with the parameters it owns. A *layer* is a child of the model's `nn.Sequential`; stages and
FSDP units consist of layers. Work is counted in floating-point operations per sample (a multiply-add is two), and
memory in elements per sample. Tests compare all numbers with the modules of `jobs/train/models`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import prod
from typing import Final

from muster.jobs.models.shapes import IMAGE_CHANNELS, KERNEL_AREA, POOL, GptShape, VggShape

IMAGE_SIDE: Final = 32
INDEX_BYTES: Final = 8  # size of a token, and of the index that max pooling keeps for each maximum
KERNEL_SIDE: Final = 3


@dataclass(frozen=True)
class TensorShape:
    """A parameter, named as in `named_parameters`."""

    name: str
    shape: tuple[int, ...]
    trained: bool = True  # False: frozen, without gradient and optimizer state

    @property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class ModelOperation:
    """One operation: its parameters, and the work and memory of its forward, per sample."""

    layer: str
    name: str
    tensors: tuple[TensorShape, ...] = ()
    flops: int = 0  # forward
    outputs: int = 0  # elements of its output
    saved: int = 0  # elements kept for the backward, except those kept by an earlier part
    saved_bytes: float = 0  # kept bytes of other dtypes, such as indices; NaN if unknown
    buffer_bytes: int = 0  # only for a user's model; `Anatomy.buffers` counts those of Muster's models
    gives_input_gradient: bool = True
    repeats: int = 1  # 2 for a product of two activations, whose backward computes two gradients

    @property
    def backward_flops(self) -> int:
        """The work of the backward.

        The first layer computes no input gradient, and an operation without weights computes only that gradient.
        """
        return self.flops * (int(self.gives_input_gradient) + int(bool(self.tensors) or self.repeats > 1))

    @property
    def multiplies(self) -> bool:
        """True if it is a matrix product or a convolution."""
        matrix = any(len(tensor.shape) > 1 for tensor in self.tensors) and self.name != "embed"
        return matrix or self.repeats > 1


@dataclass(frozen=True)
class Again:
    """Parts that are recomputed in the backward. Only their `inputs` are kept until then, per sample."""

    parts: tuple[ModelOperation, ...]
    inputs: int  # elements


@dataclass(frozen=True)
class Anatomy:
    """A whole model, with its `parts` in the order of the forward."""

    name: str
    parts: tuple[ModelOperation, ...]
    buffers: int = 0  # elements of batch norm's running statistics
    width: int = 0  # GPT: d_model; 0 if tensor parallelism is not supported
    blocks: int = 0  # GPT: number of blocks
    tokens: int = 1  # positions in one sample

    @property
    def tensors(self) -> tuple[TensorShape, ...]:
        """All parameters in the order of registration."""
        return tuple(tensor for part in self.parts for tensor in part.tensors)

    @property
    def elements(self) -> int:
        """The number of parameters."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def trained(self) -> int:
        """The number of trainable parameters."""
        return sum(tensor.elements for tensor in self.tensors if tensor.trained)

    @property
    def flops(self) -> int:
        """The work of the forward for one sample."""
        return sum(part.flops for part in self.parts)

    def layers(self) -> Iterator[tuple[str, tuple[ModelOperation, ...]]]:
        """Yield the children of the model with their parts, in the order of the forward."""
        for name, parts in groupby(self.parts, key=lambda part: part.layer):
            yield name, tuple(parts)

    def units(self) -> list[tuple[ModelOperation, ...]]:
        """List the parts that are gathered and freed together if parameters are sharded, in the order of the forward.

        For GPT: first everything around the blocks, then each block. For VGG: each convolution or linear layer with the
        parts after it.
        """
        if self.blocks:
            around = tuple(part for part in self.parts if not part.layer.startswith("block"))
            return [around, *(parts for name, parts in self.layers() if name.startswith("block"))]
        units: list[tuple[ModelOperation, ...]] = []
        for name, parts in self.layers():
            if name.startswith(("conv", "fc")) or name == "head":
                units.append(parts)
            else:
                units[-1] += parts
        return units

    def recomputed(self) -> list[Again]:
        """List the parts that are recomputed in the backward: blocks, or convolutions with the parts after them."""
        inputs = {after.name: before.outputs for before, after in pairwise(self.parts)}
        first = IMAGE_CHANNELS * IMAGE_SIDE**2
        units = self.units()[1:] if self.blocks else self.units()[:-1]
        return [Again(unit, inputs.get(unit[0].name, first)) for unit in units]

    def saved_bytes(self, itemsize: int) -> float:
        """Return the bytes kept for one sample until its backward."""
        return saved_bytes(self.parts, itemsize)

    def ready(self) -> list[tuple[TensorShape, float]]:
        """List the parameters in the order in which gradients are ready, with the share of the backward done by then.

        The backward visits the parts from last to first. Shares are of the backward's operations. The gradient of a
        tied weight is ready when the backward of the embedding is done.
        """
        total = sum(part.backward_flops for part in self.parts)
        done, order = 0, []
        for part in reversed(self.parts):
            done += part.backward_flops
            # In a linear layer the gradient of the bias is ready first; in convolutions and norms, that of the weight.
            tensors = part.tensors[::-1] if part.tensors and len(part.tensors[0].shape) == 2 else part.tensors
            order += [(tensor, done / total) for tensor in tensors]
        return order


def saved_bytes(parts: Iterable[ModelOperation], itemsize: int) -> float:
    """Return the bytes that parts keep for one sample until its backward."""
    return sum(part.saved * itemsize + part.saved_bytes for part in parts)


def layer_weight(by: str, parts: Iterable[ModelOperation]) -> float:
    """Return a layer's weight in the cut into stages; `flops` counts only matrix products and convolutions."""
    if by == "count":
        return 1.0
    if by == "parameters":
        return float(sum(tensor.elements for part in parts for tensor in part.tensors))
    return float(sum(part.flops + part.backward_flops for part in parts if part.multiplies))


def anatomy(shape: VggShape | GptShape) -> Anatomy:
    """Return the anatomy of a shape."""
    return _vgg(shape) if isinstance(shape, VggShape) else _gpt(shape)


def _vgg(shape: VggShape) -> Anatomy:
    """Return the anatomy of `jobs/train/models/vgg.py`. A ReLU works in place; its output is the next layer's input."""
    parts: list[ModelOperation] = []
    channels, side, convolutions, pools, buffers = IMAGE_CHANNELS, IMAGE_SIDE, 0, 0, 0
    kept = IMAGE_CHANNELS * IMAGE_SIDE**2  # the image, kept for the gradient of the first weight
    for width in shape.layers:
        if width == POOL:
            pools, side = pools + 1, side // 2
            out = channels * side**2
            name = f"pool{pools}"
            parts.append(
                ModelOperation(name, name, flops=4 * out, outputs=out, saved=out, saved_bytes=INDEX_BYTES * out)
            )
            continue
        convolutions += 1
        out = width * side**2
        parts += _convolution(convolutions, channels, width, out, kept)
        buffers += 2 * width
        channels, kept = width, 0
    if shape.side > 1:
        out = channels * shape.side**2
        parts.append(ModelOperation("resize", "resize", flops=out, outputs=out, saved=out))
    for number, (name, inputs, outputs) in enumerate(shape.linear, convolutions + 1):
        tensors = TensorShape(f"{name}.weight", (outputs, inputs)), TensorShape(f"{name}.bias", (outputs,))
        flops = 2 * tensors[0].elements
        if name == "head":  # the loss keeps its log-softmax and the targets
            parts.append(ModelOperation(name, name, tensors, flops, outputs, outputs, saved_bytes=INDEX_BYTES))
        else:
            relu = f"relu{number}"
            parts.append(ModelOperation(name, name, tensors, flops, outputs))
            parts.append(ModelOperation(relu, relu, (), outputs, outputs, saved=outputs))
    return Anatomy(shape.name, tuple(parts), buffers=buffers)


def _convolution(number: int, channels: int, width: int, out: int, kept: int) -> list[ModelOperation]:
    """Return the parts of a convolution with batch norm and ReLU, which must keep `kept` elements of its input."""
    conv, norm, relu = f"conv{number}", f"norm{number}", f"relu{number}"
    weights = (
        TensorShape(f"{conv}.weight", (width, channels, KERNEL_SIDE, KERNEL_SIDE)),
        TensorShape(f"{conv}.bias", (width,)),
    )
    scales = (TensorShape(f"{norm}.weight", (width,)), TensorShape(f"{norm}.bias", (width,)))
    work = 2 * KERNEL_AREA * channels * out
    return [
        ModelOperation(conv, conv, weights, work, out, saved=kept, gives_input_gradient=number > 1),
        ModelOperation(norm, norm, scales, 5 * out, out, saved=out),  # keeps the convolution's output
        ModelOperation(relu, relu, (), out, out, saved=out),  # keeps its output, which overwrites that of batch norm
    ]


def _gpt(shape: GptShape) -> Anatomy:
    """Return the anatomy of `jobs/train/models/gpt.py`, whose attention keeps no (tokens, tokens) matrix."""
    d, tokens = shape.d_model, shape.context
    embeddings = (
        TensorShape("embed.token.weight", (shape.vocabulary, d)),
        TensorShape("embed.position.weight", (tokens, d)),
    )
    wide = tokens * d
    parts = [ModelOperation("embed", "embed", embeddings, wide, wide, saved_bytes=INDEX_BYTES * tokens)]
    for block in range(1, shape.layers + 1):
        parts += _block(shape, f"block{block}")
    parts.append(_norm(shape, "norm", "norm"))
    logits = tokens * shape.vocabulary  # the loss keeps their log-softmax
    head = _linear(shape, "head", "head", d, shape.vocabulary, bias=shape.bias and not shape.tied, saved=wide + logits)
    if shape.tied:  # the embedding owns the weight; count the work here and the gradient there
        head = ModelOperation("head", "head", (), head.flops, head.outputs, head.saved, repeats=2)
    parts.append(head)
    return Anatomy(shape.name, tuple(parts), width=d, blocks=shape.layers, tokens=tokens)


def _block(shape: GptShape, layer: str) -> list[ModelOperation]:
    d, ff, tokens = shape.d_model, shape.d_ff, shape.context
    wide, bias = tokens * d, shape.bias
    in_attention, in_mlp = f"{layer}.attention", f"{layer}.mlp"
    causal = 2 * tokens * tokens * d  # two products with (tokens, tokens) matrices, of which half is masked
    return [
        _norm(shape, layer, f"{layer}.norm1"),
        _linear(shape, layer, f"{in_attention}.query", d, d, bias=bias, saved=wide),
        _linear(shape, layer, f"{in_attention}.key", d, d, bias=bias),
        _linear(shape, layer, f"{in_attention}.value", d, d, bias=bias),
        # Attention keeps query, key, value, its output, and a log-sum-exp for each row and head.
        ModelOperation(layer, in_attention, (), causal, wide, saved=4 * wide + shape.heads * tokens, repeats=2),
        _linear(shape, layer, f"{in_attention}.output", d, d, bias=bias),
        _norm(shape, layer, f"{layer}.norm2"),
        _linear(shape, layer, f"{in_mlp}.up", d, ff, bias=bias, saved=wide),
        ModelOperation(layer, f"{in_mlp}.gelu", (), 8 * tokens * ff, tokens * ff, saved=tokens * ff),
        _linear(shape, layer, f"{in_mlp}.down", ff, d, bias=bias, saved=tokens * ff),
    ]


def _norm(shape: GptShape, layer: str, name: str) -> ModelOperation:
    """Return the part of a norm, which keeps its input, 1 or 2 numbers per row, and for RMS the unscaled output."""
    wide = shape.context * shape.d_model
    scale = TensorShape(f"{name}.weight", (shape.d_model,))
    if shape.norm == "layer":
        shift = TensorShape(f"{name}.bias", (shape.d_model,))
        return ModelOperation(layer, name, (scale, shift), 5 * wide, wide, saved=wide + 2 * shape.context)
    return ModelOperation(layer, name, (scale,), 5 * wide, wide, saved=2 * wide + shape.context)


def _linear(
    shape: GptShape, layer: str, name: str, inputs: int, outputs: int, *, bias: bool, saved: int = 0
) -> ModelOperation:
    weight = TensorShape(f"{name}.weight", (outputs, inputs))
    tensors = (weight, TensorShape(f"{name}.bias", (outputs,))) if bias else (weight,)
    return ModelOperation(
        layer, name, tensors, 2 * shape.context * weight.elements, shape.context * outputs, saved=saved
    )
