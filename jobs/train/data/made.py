"""The user's own data: `train.data.make` names a function that returns (train, eval), two map-style Datasets.

A sample is a pair (input, target) of tensors or numbers. The samples of a batch are stacked. Before a training sample
is read, the CPU's random generators are seeded by (seed, epoch, sample), so that augmentation is the same on any number
of ranks and after a restart.
"""

import hashlib
import json
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.utils.data import default_collate

from muster.jobs.basics.errors import RefusedError
from muster.jobs.train.rng.draws import drawing, seed_all
from muster.jobs.train.rng.keyed import AUGMENT, key
from muster.jobs.user import code

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings

KEY: Final = "train.data"
FIRST_EPOCH: Final = 0
# Used in place of an epoch for evaluation samples, which are the same every time.
EVALUATION: Final = -1


class Made:
    """A user's two data sets. `evaluation` is None if the user's function returned no evaluation set."""

    def __init__(self, text: str, train: Any, evaluation: Any, settings: "TrainSettings") -> None:
        self.name = text
        self.train = train
        self.evaluation = evaluation
        self.seed = settings.seed
        self.args = settings.data.args
        self.train_samples = len(train)
        self.eval_samples = 0 if evaluation is None else len(evaluation)
        classes = getattr(train, "classes", ())
        self.vocabulary = settings.model.vocabulary or (len(classes) if isinstance(classes, list | tuple) else 0)
        inputs, targets = self.train_batch(torch.tensor([0]), FIRST_EPOCH)
        self.sample_shape = tuple(inputs.shape[1:])
        in_tokens = targets.dim() > 1 and not targets.is_floating_point()
        self.unit = "tokens" if in_tokens else "samples"
        self.units_per_sample = targets[0].numel() if in_tokens else 1

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of arguments, lengths, and the first, middle and last sample of both sets."""
        digest = hashlib.sha256(json.dumps([self.name, self.args, self.train_samples, self.eval_samples]).encode())
        for samples, read in (
            (self.train_samples, partial(self.train_batch, epoch=FIRST_EPOCH)),
            (self.eval_samples, self.eval_batch),
        ):
            some = sorted({0, samples // 2, samples - 1}) if samples else []
            for index in some:
                for tensor in read(torch.tensor([index])):
                    digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def train_batch(self, indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of training samples, (batch, ...) each; float64 becomes float32."""
        return self._batch("train", self.train, indices.tolist(), epoch)

    def eval_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of evaluation samples, (batch, ...) each."""
        return self._batch("eval", self.evaluation, indices.tolist(), EVALUATION)

    def _batch(self, which: str, samples: Any, indices: Iterable[int], epoch: int) -> tuple[Tensor, Tensor]:
        found = []
        with drawing(self.seed):
            for index in indices:
                seed_all(key(self.seed, AUGMENT, epoch, index))
                what = f"sample {index} of the {which} set of {self.name}"
                found.append(code.called(f"{KEY}.make", what, samples.__getitem__, index))
        return self._stacked(which, found)

    def _stacked(self, which: str, samples: list[Any]) -> tuple[Tensor, Tensor]:
        first = samples[0]
        if not isinstance(first, tuple | list) or len(first) != 2:
            what = f"a sample of the {which} set of {self.name} is a {_shown(first)}"
            raise RefusedError(f"{KEY}.make: {what}; return a pair of input and target")
        stacked = code.called(
            f"{KEY}.make", f"stacking samples of the {which} set of {self.name}", default_collate, samples
        )
        for part, given, tensor in zip(("input", "target"), first, stacked, strict=True):
            if not isinstance(tensor, Tensor):
                what = f"the {part} of a sample of the {which} set of {self.name} is a {_shown(given)}"
                raise RefusedError(f"{KEY}.make: {what}; return a tensor or a number")
        inputs, targets = (each.float() if each.dtype == torch.float64 else each for each in stacked)
        return inputs, targets


def open_made(settings: "TrainSettings") -> Made:
    """Call the user's function, which returns two data sets.

    Raises:
        RefusedError: if the function cannot be called, raises, or does not return two map-style Datasets; or if a
            built-in model needs the number of classes or tokens and it is unknown.
    """
    text = settings.data.make
    assert text is not None
    with drawing(key(settings.seed, AUGMENT)):
        pair = code.make(KEY, text, settings.data.args, Path.cwd())
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise RefusedError(f"{KEY}.make: {text} returned a {_shown(pair)}; return a pair (train, eval)")
    for which, samples in zip(("train", "eval"), pair, strict=True):
        if samples is None and which == "eval":
            continue
        for method in ("__len__", "__getitem__"):
            if not hasattr(samples, method):
                raise RefusedError(
                    f"{KEY}.make: the {which} set of {text}, a {type(samples).__name__}, has no {method}; "
                    "return a map-style Dataset, whose samples are numbered"
                )
    if not len(pair[0]):
        raise RefusedError(f"{KEY}.make: the train set of {text} has no samples; return at least one")
    train, evaluation = pair
    data = Made(text, train, evaluation, settings)
    if settings.model.make is None and not data.vocabulary:
        raise RefusedError(
            f"train.model.vocabulary: the number of classes or tokens of {text} is unknown; add vocabulary to model"
        )
    return data


def _shown(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} of {len(value)}" if isinstance(value, tuple | list) else kind
