"""A ResNet of torchvision.

model: {make: model/resnet.py:build, args: {name: resnet18, num_classes: 10}}
data: cifar10
"""

from typing import Any

from torch import nn
from torchvision.models import get_model


def build(name: str, **options: Any) -> nn.Module:
    """Return the torchvision model of this name, with new weights."""
    model: nn.Module = get_model(name, weights=None, **options)
    return model
