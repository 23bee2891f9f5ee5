"""Models by name: a table of builders, each a flat stack of named layers that stages can be cut from."""

from typing import TYPE_CHECKING

from muster.jobs.models.model_shape import resolve_shape
from muster.jobs.models.shapes import VggShape
from muster.jobs.train.models.gpt import build_gpt
from muster.jobs.train.models.stack import Stack
from muster.jobs.train.models.vgg import build_vgg

if TYPE_CHECKING:
    from muster.jobs.spec.train_fields import ModelSettings


def build_model(settings: "ModelSettings", *, vocabulary: int, seed: int) -> Stack:
    """Build a model on the CPU, in float32, its parameters a function of the seed alone.

    `vocabulary` is the number of classes or of tokens of the data. VGG maps images (batch, 3, 32, 32) to logits
    (batch, classes); GPT maps tokens (batch, context) to logits (batch, context, vocabulary). With targets too, both
    return the mean loss.

    Raises:
        RefusedError: settings and data do not fit, as `resolve_shape` says.
    """
    shape = resolve_shape(settings, vocabulary)
    return build_vgg(shape, seed) if isinstance(shape, VggShape) else build_gpt(shape, seed)
