"""Data sets by name: a table of openers, and the one face that the trainer sees of them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from torch import Tensor

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.sections import given
from muster.jobs.train.data import image_sets, made, token_sets

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


class Data(Protocol):
    """Samples by index, split into a training and an evaluation part.

    Images are float32 (samples, 3, 32, 32) with int64 labels (samples,); tokens are int64 (samples, context) with
    the tokens one later as targets. A training batch is a function of seed, epoch and indices, not of what was read
    before it.
    """

    @property
    def name(self) -> str:
        """What the data is called in messages."""

    @property
    def train_samples(self) -> int:
        """Samples of the training part."""

    @property
    def eval_samples(self) -> int:
        """Samples of the evaluation part."""

    @property
    def vocabulary(self) -> int:
        """Number of classes, or of tokens."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one input."""

    @property
    def unit(self) -> str:
        """What speed is counted in: samples or tokens."""

    @property
    def units_per_sample(self) -> int:
        """1 for an image, the context for a window of tokens."""

    @property
    def fingerprint(self) -> str:
        """The sha256 of the data itself, in hex, computed when first asked for: the ranks of a run must agree."""

    def train_batch(self, indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of training samples, augmented as the job says."""

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
        RefusedError: the data is not on this machine, is too small, or does not fit the model or `augment`.
        StorageError: python-source cannot be prepared.
    """
    return OPENERS["make" if settings.data.make else settings.data.name or "text"](settings)


def require_batch(settings: "TrainSettings", data: Data) -> None:
    """Refuse a batch size that was given and that the data cannot fill; the default one shrinks to a small text.

    Raises:
        RefusedError: it is larger than the data set.
    """
    if "batch_size" in given(settings) and settings.batch_size > data.train_samples:
        raise RefusedError(
            f"train.batch_size: {settings.batch_size} is more than data {data.name} has training samples; "
            f"use at most {data.train_samples}"
        )
