"""Data sets by name: a table of functions that open them, and the interface that the trainer uses."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from torch import Tensor

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.sections import given
from muster.jobs.train.data import image_sets, made, token_sets

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


class Data(Protocol):
    """Samples by index, in a training and an evaluation part.

    Images are float32 (samples, 3, 32, 32) with int64 labels (samples,). Tokens are int64 (samples, context); their
    targets are the tokens shifted by one. A training batch is a function of seed, epoch and indices, and does not
    depend
    on earlier reads.
    """

    @property
    def name(self) -> str:
        """The name of the data in messages."""

    @property
    def train_samples(self) -> int:
        """The number of training samples."""

    @property
    def eval_samples(self) -> int:
        """The number of evaluation samples."""

    @property
    def vocabulary(self) -> int:
        """Number of classes, or of tokens."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one input."""

    @property
    def unit(self) -> str:
        """The unit of speed: samples or tokens."""

    @property
    def units_per_sample(self) -> int:
        """1 for an image, the context for a window of tokens."""

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
    return OPENERS["make" if settings.data.make else settings.data.name or "text"](settings)


def require_batch(settings: "TrainSettings", data: Data) -> None:
    """Refuse an explicit batch size larger than the data set. The default shrinks to a small text instead.

    Raises:
        RefusedError: if it is larger than the data set.
    """
    if "batch_size" in given(settings) and settings.batch_size > data.train_samples:
        raise RefusedError(
            f"train.batch_size: {settings.batch_size} is more than data {data.name} has training samples; "
            f"use at most {data.train_samples}"
        )
