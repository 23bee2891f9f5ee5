"""Models by name: a table of builders, each a flat `nn.Sequential` of named children that stages can be cut from."""

from torch import nn

from jobs.model_shape import resolve_shape
from jobs.shapes import VggShape
from jobs.spec import ModelSettings
from jobs.train.models.gpt import build_gpt
from jobs.train.models.vgg import build_vgg


def build_model(settings: ModelSettings, *, vocabulary: int, seed: int) -> nn.Sequential:
    """Build a model on the CPU, in float32, its parameters a function of the seed alone.

    `vocabulary` is the number of classes or of tokens of the data. VGG maps images (batch, 3, 32, 32) to logits
    (batch, classes); GPT maps tokens (batch, context) to logits (batch, context, vocabulary).

    Raises:
        RefusedError: settings and data do not fit, as `resolve_shape` says.
    """
    shape = resolve_shape(settings, vocabulary)
    return build_vgg(shape, seed) if isinstance(shape, VggShape) else build_gpt(shape, seed)
