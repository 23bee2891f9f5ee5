"""Data sets by name: a table of functions that open them, and the interface that the trainer uses."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from torch import Tensor

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.sections import given
from muster.jobs.train.data import image_sets, made, token_sets
from muster.jobs.train.data.images import Images

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


class Data(Protocol):
    """A data set with a training and an evaluation part, read by sample index.

    Images are float32 (samples, 3, 32, 32) with int64 labels (samples,). Tokens are int64 (samples, context); their
    targets are the tokens shifted by one. A training batch depends only on the seed, the epoch and the indices, not on
    earlier reads.
    """

    @property
    def name(self) -> str:
        """The name of the data set in messages."""

    @property
    def train_samples(self) -> int:
        """The number of training samples."""

    @property
    def eval_samples(self) -> int:
        """The number of evaluation samples."""

    @property
    def vocabulary(self) -> int:
        """The number of classes of images, or of different tokens."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one input."""

    @property
    def unit(self) -> str:
        """The unit of speed: samples or tokens."""

    @property
    def units_per_sample(self) -> int:
        """The units in one sample: 1 for an image, the context length for a window of tokens."""

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the data in hex, computed on first use. The ranks of a run must agree on it."""

    def train_batch(self, indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of training samples, augmented according to the job."""

    def eval_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of evaluation samples, never augmented."""


OPENERS: Final[dict[str, Callable[["TrainSettings"], Data]]] = {
    "digits": image_sets.open_digits,
    "cifar10": image_sets.open_cifar10,
    "python-source": token_sets.open_python_source,
    "text": token_sets.open_text,
    "make": made.open_made,
    "synthetic": lambda settings: (
        token_sets.open_synthetic(settings) if settings.model.reads_tokens else image_sets.open_synthetic(settings)
    ),
}


def open_data(settings: "TrainSettings") -> Data:
    """Open the data set of a job; files are mapped into memory, not read.

    Raises:
        RefusedError: if the data is not on this machine, is too small, or does not fit the model or `augment`.
        StorageError: if python-source cannot be prepared.
    """
    data = OPENERS["make" if settings.data.make else settings.data.name or "text"](settings)
    return image_sets.partitioned(data, settings.data) if isinstance(data, Images) else data


def require_batch(settings: "TrainSettings", data: Data) -> None:
    """Refuse an explicit batch size larger than the data set. A default batch size is reduced instead.

    Raises:
        RefusedError: if the job sets a batch size larger than the data set.
    """
    if "batch_size" in given(settings) and settings.batch_size > data.train_samples:
        raise RefusedError(
            f"train.batch_size: {settings.batch_size} is larger than the training part of data {data.name}; "
            f"use at most {data.train_samples}"
        )
