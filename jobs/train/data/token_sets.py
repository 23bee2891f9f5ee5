"""The token data sets: bytes of a text (python-source, or a user's own file), and synthetic (random)."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from muster.jobs.basics.errors import RefusedError
from muster.jobs.data import datafiles
from muster.jobs.models.model_shape import context_of
from muster.jobs.models.shapes import GptShape
from muster.jobs.train.data.mapped import map_bytes
from muster.jobs.train.rng.keyed import SYNTHETIC, key, uniform_ints

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings

BYTES: Final = 256
SYNTHETIC_TRAIN_SAMPLES: Final = 8192
SYNTHETIC_EVAL_SAMPLES: Final = 512
# maximum windows per evaluation: the whole last tenth of a text may take longer than a short training run
TEXT_EVAL_SAMPLES: Final = 1024


@dataclass(frozen=True)
class Tokens:
    """A token data set. `train` and `evaluation` return windows of `context` tokens and the next token, by index.

    A batch of windows is int64 (batch, context + 1). The first `context` tokens of a window are the inputs, the last
    `context` are the targets.
    """

    name: str
    context: int
    vocabulary: int
    train_samples: int
    eval_samples: int
    train: Callable[[Tensor], Tensor]
    evaluation: Callable[[Tensor], Tensor]
    digest: Callable[[], str]
    unit: str = "tokens"

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of a window without its last token."""
        return (self.context,)

    @property
    def units_per_sample(self) -> int:
        """The number of tokens per sample."""
        return self.context

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of the data, computed on first use."""
        return self.digest()

    def train_batch(self, indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Return tokens and the tokens shifted by one, int64 (batch, context) each, the same in every epoch."""
        return _shifted(self.train(indices))

    def eval_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens and the tokens shifted by one, int64 (batch, context) each."""
        return _shifted(self.evaluation(indices))


def _shifted(windows: Tensor) -> tuple[Tensor, Tensor]:
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()  # (batch, context) each


def open_python_source(settings: "TrainSettings") -> Tokens:
    """Open the source of Python's standard library as bytes; the first use on a machine prepares the file.

    Raises:
        StorageError: if the prepared file cannot be written.
    """
    return _text_tokens("python-source", datafiles.prepare_python_source(datafiles.data_root()).path, settings)


def open_text(settings: "TrainSettings") -> Tokens:
    """Open a user's own file as bytes.

    Raises:
        RefusedError: if the file is missing, unreadable, empty or too short.
    """
    assert settings.data.text is not None
    return _text_tokens(f"text {settings.data.text}", datafiles.text_file(settings.data.text), settings)


def _text_tokens(name: str, path: Path, settings: "TrainSettings") -> Tokens:
    """Cut a file into windows; the last tenth of them, at least one, is held out from training.

    An evaluation reads at most TEXT_EVAL_SAMPLES of the held-out windows, evenly spread, or all of them with
    `evaluate: all`. Window i reads bytes i * context to (i + 1) * context, both included. Every byte is an input once
    and a target once, except the first, the last, and a tail shorter than a window, which is dropped.
    """
    _refuse_augment(settings)
    context = context_of(settings.model)
    size = path.stat().st_size
    if size < 2 * context + 1:
        raise RefusedError(
            f"{path}: {size} bytes are too few for a context of {context}, which needs {2 * context + 1}: one window "
            "to train on and one to evaluate; use more text or a smaller train.model.context"
        )
    windows = map_bytes(path).unfold(0, context + 1, context)  # (windows, context + 1), a view
    held_out = max(1, len(windows) // 10)
    train_samples = len(windows) - held_out
    evaluated = held_out if settings.evaluate == "all" else min(held_out, TEXT_EVAL_SAMPLES)
    return Tokens(
        name=name,
        context=context,
        vocabulary=BYTES,
        train_samples=train_samples,
        eval_samples=evaluated,
        train=lambda indices: windows[:train_samples][indices].to(torch.int64),
        evaluation=lambda indices: windows[train_samples + indices * held_out // evaluated].to(torch.int64),
        digest=lambda: datafiles.sha256_of(path),
    )


def open_synthetic(settings: "TrainSettings") -> Tokens:
    """Generate independent uniform tokens. There is nothing to learn: a good model's loss is log(vocabulary)."""
    _refuse_augment(settings)
    context = context_of(settings.model)
    vocabulary = settings.model.vocabulary or GptShape.vocabulary
    draws = key(SYNTHETIC)
    place = torch.arange(context + 1)

    def windows(samples: Tensor) -> Tensor:
        index = samples[:, None] * (context + 1) + place  # (batch, context + 1)
        return uniform_ints(draws, index, 0, vocabulary)

    description = f"synthetic tokens 1 {SYNTHETIC_TRAIN_SAMPLES} {SYNTHETIC_EVAL_SAMPLES} {context} {vocabulary}"
    return Tokens(
        name="synthetic",
        context=context,
        vocabulary=vocabulary,
        train_samples=SYNTHETIC_TRAIN_SAMPLES,
        eval_samples=SYNTHETIC_EVAL_SAMPLES,
        train=windows,
        evaluation=lambda indices: windows(indices + SYNTHETIC_TRAIN_SAMPLES),
        digest=lambda: hashlib.sha256(description.encode()).hexdigest(),
    )


def _refuse_augment(settings: "TrainSettings") -> None:
    if settings.augment:
        raise RefusedError("train.augment: true works only for images, but the data is tokens; remove augment")
