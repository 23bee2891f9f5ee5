"""Turn the model settings of a job into a shape: a row of `jobs/models/shapes.py` with the job's overrides."""

from dataclasses import replace
from typing import TYPE_CHECKING

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.sections import changed
from muster.jobs.models.shapes import GPT_SHAPES, VGG_SHAPES, GptShape, VggShape

if TYPE_CHECKING:
    from muster.jobs.spec.train_fields import ModelSettings


def resolve_shape(settings: "ModelSettings", vocabulary: int) -> VggShape | GptShape:
    """Return the shape for a job's model settings, on data with `vocabulary` classes or tokens.

    Raises:
        RefusedError: if the settings do not fit the data, the model or each other.
    """
    if settings.make is not None:
        raise RefusedError(
            f"train.model.make: the work of {settings.make} is unknown until its ranks run it; predictions support "
            "only Muster's own models; muster memory can count its memory"
        )
    wanted = settings.vocabulary or vocabulary
    if wanted < vocabulary:
        raise RefusedError(
            f"train.model.vocabulary: {wanted} is too small for data with {vocabulary} classes or tokens; "
            f"use at least {vocabulary}, or remove vocabulary"
        )
    if settings.name in VGG_SHAPES:
        return _resolve_vgg(settings, wanted)
    return _resolve_gpt(settings, wanted)


def context_of(settings: "ModelSettings") -> int:
    """Return the context length of a GPT: from the settings, else from its table row."""
    if settings.context is not None:
        return settings.context
    return GPT_SHAPES[settings.name].context if settings.name in GPT_SHAPES else GptShape.context


def _resolve_vgg(settings: "ModelSettings", classes: int) -> VggShape:
    foreign = [field for field in ("context", "tied", "bias", "norm", "dropout") if field in changed(settings)]
    if foreign:
        raise RefusedError(f"train.model.{foreign[0]}: {settings.name} has no such setting; remove it, or choose a gpt")
    assert settings.name is not None
    return replace(VGG_SHAPES[settings.name], classes=classes)


def _resolve_gpt(settings: "ModelSettings", vocabulary: int) -> GptShape:
    if settings.name is not None:
        row = GPT_SHAPES[settings.name]
    else:
        d_model, d_ff, layers, heads = settings.d_model, settings.d_ff, settings.layers, settings.heads
        assert d_model is not None
        assert d_ff is not None
        assert layers is not None
        assert heads is not None
        row = GptShape("gpt", d_model, d_ff, layers, heads)
    if row.d_model % row.heads:
        raise RefusedError(
            f"train.model.heads: {row.heads} heads do not divide d_model {row.d_model}; choose a divisor of it"
        )
    return replace(
        row,
        context=context_of(settings),
        vocabulary=vocabulary,
        tied=settings.tied,
        bias=settings.bias,
        norm=settings.norm,
        dropout=settings.dropout,
    )
