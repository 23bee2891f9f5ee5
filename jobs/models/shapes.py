"""Model shapes as tables, torch-free: the dimensions of each named model, and its number of parameters.

VGG: Simonyan & Zisserman 2014, table 1, columns A, B, D, E, in the usual variant for 32x32 images: batch norm
after each convolution and one linear layer at the end. GPT: the size table of Stanford CS336 (2024), assignment 2.
"""

from dataclasses import dataclass
from typing import Final, Literal

POOL: Final = 0
IMAGE_CHANNELS: Final = 3
KERNEL_AREA: Final = 9


@dataclass(frozen=True)
class VggShape:
    """Output channels of each 3x3 convolution in order; `POOL` halves height and width."""

    name: str
    layers: tuple[int, ...]
    classes: int = 10

    def parameter_count(self) -> int:
        """Count weights and biases of convolutions, batch norms and the linear layer."""
        total, channels = 0, IMAGE_CHANNELS
        for width in self.layers:
            if width != POOL:
                total += channels * width * KERNEL_AREA + width  # convolution
                total += 2 * width  # batch norm
                channels = width
        return total + channels * self.classes + self.classes


@dataclass(frozen=True)
class GptShape:
    """A decoder-only transformer with learned positions; pre-norm blocks of attention and a two-layer GELU MLP."""

    name: str
    d_model: int
    d_ff: int
    layers: int
    heads: int
    context: int = 128
    vocabulary: int = 256
    tied: bool = True
    bias: bool = False
    norm: Literal["rms", "layer"] = "rms"
    dropout: float = 0.0

    def parameter_count(self) -> int:
        """Count every parameter once; a tied head counts as the embedding."""
        d, ff = self.d_model, self.d_ff
        norm = d * (2 if self.norm == "layer" else 1)
        block = 4 * d * d + 2 * d * ff + 2 * norm
        if self.bias:
            block += 4 * d + ff + d
        head = 0 if self.tied else self.vocabulary * d + (self.vocabulary if self.bias else 0)
        return self.vocabulary * d + self.context * d + self.layers * block + norm + head


def _vgg(name: str, *blocks: tuple[int, int]) -> VggShape:
    """Expand (convolutions, channels) per block, each block ending in a pool."""
    return VggShape(name, tuple(width for count, channels in blocks for width in (*[channels] * count, POOL)))


VGG_SHAPES: Final[dict[str, VggShape]] = {
    shape.name: shape
    for shape in (
        _vgg("vgg11", (1, 64), (1, 128), (2, 256), (2, 512), (2, 512)),
        _vgg("vgg13", (2, 64), (2, 128), (2, 256), (2, 512), (2, 512)),
        _vgg("vgg16", (2, 64), (2, 128), (3, 256), (3, 512), (3, 512)),
        _vgg("vgg19", (2, 64), (2, 128), (4, 256), (4, 512), (4, 512)),
    )
}

GPT_SHAPES: Final[dict[str, GptShape]] = {
    shape.name: shape
    for shape in (
        #        name         d_model  d_ff  layers heads
        GptShape("gpt-nano", 64, 256, 2, 2, context=64),
        GptShape("gpt-micro", 192, 768, 4, 4),
        GptShape("gpt-small", 768, 3072, 12, 12),
        GptShape("gpt-medium", 1024, 4096, 24, 16),
        GptShape("gpt-large", 1280, 5120, 36, 20),
        GptShape("gpt-xl", 1600, 6400, 48, 25),
        GptShape("gpt-2.7b", 2560, 10240, 32, 32),
    )
}
