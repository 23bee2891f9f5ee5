"""Models: the user's, and Muster's own, which are flat stacks of named layers so that they can be cut into stages."""

from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from muster.jobs.models.model_shape import resolve_shape
from muster.jobs.models.shapes import VggShape
from muster.jobs.train.models.gpt import build_gpt
from muster.jobs.train.models.made import loss_of, make_model
from muster.jobs.train.models.stack import LayerStack, head_loss
from muster.jobs.train.models.vgg import build_vgg

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings
    from muster.jobs.spec.train_fields import ModelSettings


def model_of(settings: "TrainSettings", *, vocabulary: int) -> nn.Module:
    """Build a job's model on the CPU, in float32: a built-in model, or the result of the user's function.

    `vocabulary` is the number of classes or tokens of the data. It is not passed to a user's function.

    Raises:
        RefusedError: if settings and data do not fit, or the user's function fails.
    """
    if settings.model.make is not None:
        return make_model(settings)
    own = build_model(settings.model, vocabulary=vocabulary, seed=settings.seed)
    if settings.loss is not None:
        own.run_loss = partial(head_loss, loss_of(settings))
    return own


def build_model(settings: "ModelSettings", *, vocabulary: int, seed: int) -> LayerStack:
    """Build a model on the CPU, in float32, with parameters that depend only on the seed.

    `vocabulary` is the number of classes or tokens of the data. VGG maps images (batch, 3, 32, 32) to logits
    (batch, classes); GPT maps tokens (batch, context) to logits (batch, context, vocabulary). If called with targets,
    both return the mean loss.

    Raises:
        RefusedError: if settings and data do not fit, as for `resolve_shape`.
    """
    shape = resolve_shape(settings, vocabulary)
    return build_vgg(shape, seed) if isinstance(shape, VggShape) else build_gpt(shape, seed)
