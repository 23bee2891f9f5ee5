"""VGG for 32x32 images (Simonyan & Zisserman 2014), with batch norm after each convolution."""

from collections import OrderedDict

import torch
from torch import nn

from muster.jobs.models.shapes import IMAGE_CHANNELS, POOL, VggShape
from muster.jobs.train.models.stack import LayerStack
from muster.jobs.train.rng.keyed import INITIALISE, key


def build_vgg(shape: VggShape, seed: int) -> LayerStack:
    """Build conv1, norm1, relu1, pool1, ... head, from images (batch, 3, 32, 32) to logits (batch, classes)."""
    with torch.random.fork_rng(devices=[]):  # layers draw initial values, which are overwritten below
        model = assemble_vgg(shape)
    _initialise(model, torch.Generator().manual_seed(key(seed, INITIALISE)))
    return model


def assemble_vgg(shape: VggShape) -> LayerStack:
    """Assemble the layers with arbitrary values."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels, convolutions, pools = IMAGE_CHANNELS, 0, 0
    for width in shape.layers:
        if width == POOL:
            pools += 1
            layers[f"pool{pools}"] = nn.MaxPool2d(2)  # (batch, channels, side / 2, side / 2)
            continue
        convolutions += 1
        layers[f"conv{convolutions}"] = nn.Conv2d(channels, width, 3, padding=1)  # (batch, width, side, side)
        layers[f"norm{convolutions}"] = nn.BatchNorm2d(width)
        layers[f"relu{convolutions}"] = nn.ReLU(inplace=True)
        channels = width
    if shape.side > 1:
        layers["resize"] = nn.AdaptiveAvgPool2d(shape.side)  # (batch, channels, side, side): copies of the one pixel
    layers["flatten"] = nn.Flatten()  # (batch, channels * side^2): five pools reduce 32 pixels to one
    for number, (name, inputs, outputs) in enumerate(shape.linear, convolutions + 1):
        layers[name] = nn.Linear(inputs, outputs)  # (batch, outputs)
        if name != "head":
            layers[f"relu{number}"] = nn.ReLU(inplace=True)
    stack = LayerStack(layers)
    stack.shape = shape
    return stack


def _initialise(model: nn.Module, generator: torch.Generator) -> None:
    """Initialise convolutions as in He et al. 2015 (normal, fan out), linear layers normal(0, 0.01), biases 0."""
    for layer in model.children():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu", generator=generator)
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01, generator=generator)
        else:
            continue
        assert layer.bias is not None
        nn.init.zeros_(layer.bias)
