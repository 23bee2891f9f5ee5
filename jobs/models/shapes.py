"""Tables of model shapes: the dimensions and the number of parameters of each named model. Torch-free.

VGG: Simonyan & Zisserman 2014, table 1, columns A, B, D, E, in the usual variant for 32x32 images, with batch norm
after each convolution and one linear layer at the end. Rows with 4096 have the paper's three linear layers, without
dropout. They read the one pixel that is left of 32x32, or 7x7 copies of it, as torchvision's vgg16 does.
GPT: the size table of Stanford CS336 (2024), assignment 2.
"""

from dataclasses import dataclass
from typing import Final, Literal

POOL: Final = 0
IMAGE_CHANNELS: Final = 3
KERNEL_AREA: Final = 9


@dataclass(frozen=True)
class VggShape:
    """A VGG: `layers` has the output channels of each 3x3 convolution, or `POOL`, which halves height and width.

    `hidden` has the outputs of the linear layers before the last one; `side` is the height and width of their input.
    """

    name: str
    layers: tuple[int, ...]
    classes: int = 10
    hidden: tuple[int, ...] = ()
    side: int = 1

    @property
    def linear(self) -> tuple[tuple[str, int, int], ...]:
        """The name, inputs and outputs of each linear layer: fc1, fc2, ..., head."""
        convolved = [width for width in self.layers if width != POOL]
        widths = (convolved[-1] * self.side**2, *self.hidden, self.classes)
        names = (*(f"fc{number}" for number in range(1, len(self.hidden) + 1)), "head")
        return tuple(zip(names, widths, widths[1:], strict=False))

    def parameter_count(self) -> int:
        """Count weights and biases of convolutions, batch norms and linear layers."""
        total, channels = 0, IMAGE_CHANNELS
        for width in self.layers:
            if width != POOL:
                total += channels * width * KERNEL_AREA + width  # convolution
                total += 2 * width  # batch norm
                channels = width
        return total + sum(inputs * outputs + outputs for _, inputs, outputs in self.linear)


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
    norm: Literal["rms", "rms_fused", "layer"] = "rms"
    dropout: float = 0.0

    def parameter_count(self) -> int:
        """Count every parameter once. A tied head shares the embedding's weight."""
        d, ff = self.d_model, self.d_ff
        norm = d * (2 if self.norm == "layer" else 1)
        block = 4 * d * d + 2 * d * ff + 2 * norm
        if self.bias:
            block += 4 * d + ff + d
        head = 0 if self.tied else self.vocabulary * d + (self.vocabulary if self.bias else 0)
        return self.vocabulary * d + self.context * d + self.layers * block + norm + head


def _vgg(name: str, *blocks: tuple[int, int], hidden: tuple[int, ...] = (), side: int = 1) -> VggShape:
    """Expand blocks, given as (convolutions, channels). Each block ends with a pool."""
    layers = tuple(width for count, channels in blocks for width in (*[channels] * count, POOL))
    return VggShape(name, layers, hidden=hidden, side=side)


_D: Final = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))  # the blocks of vgg16


VGG_SHAPES: Final[dict[str, VggShape]] = {
    shape.name: shape
    for shape in (
        _vgg("vgg11", (1, 64), (1, 128), (2, 256), (2, 512), (2, 512)),
        _vgg("vgg13", (2, 64), (2, 128), (2, 256), (2, 512), (2, 512)),
        _vgg("vgg16", *_D),
        _vgg("vgg16-4096", *_D, hidden=(4096, 4096)),
        _vgg("vgg16-4096-7x7", *_D, hidden=(4096, 4096), side=7),
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
