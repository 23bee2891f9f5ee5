"""Image data sets in memory or mapped from a file, read as normalised batches with keyed random augmentation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from muster.jobs.train.rng.keyed import AUGMENT, key, uniform_ints

SIDE = 32
PADDING = 4
# The purposes of the random numbers of one sample in one epoch.
DRAW_TOP, DRAW_LEFT, DRAW_FLIP = range(3)


@dataclass(frozen=True)
class ImageSet:
    """The training or evaluation part: sample i is image `rows[i]` (image i without `rows`) with label `labels[i]`."""

    pixels: Tensor  # uint8 (images, 3, 32, 32)
    labels: Tensor  # (samples,) of any integer type
    rows: Tensor | None = None  # int64 (samples,)

    def select(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return pixels uint8 (batch, 3, 32, 32) and labels int64 (batch,) of some samples."""
        rows = indices if self.rows is None else self.rows[indices]
        return self.pixels[rows], self.labels[indices].to(torch.int64)

    def part(self, indices: Sequence[int]) -> "ImageSet":
        """Return the set of some samples."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        return ImageSet(self.pixels, self.labels[chosen], chosen if self.rows is None else self.rows[chosen])


@dataclass(frozen=True)
class Normalise:
    """A function that divides pixels by `full`, then scales them to mean 0 and standard deviation 1 per channel."""

    full: float
    mean: Sequence[float]
    std: Sequence[float]

    def __call__(self, pixels: Tensor) -> Tensor:
        """Map pixels uint8 (batch, 3, 32, 32) to float32 of the same shape."""
        std = torch.tensor(self.std).view(-1, 1, 1)
        mean = torch.tensor(self.mean).view(-1, 1, 1)
        return pixels.to(torch.float32).mul_(1 / (self.full * std)).sub_(mean / std)


@dataclass(frozen=True)
class Images:
    """An image data set; `crop` and `flip` select how training batches are augmented."""

    name: str
    train: ImageSet
    evaluation: ImageSet
    normalise: Normalise
    classes: int
    seed: int
    digest: Callable[[], str]
    crop: bool = False
    flip: bool = False
    unit: str = "samples"
    units_per_sample: int = 1

    @property
    def train_samples(self) -> int:
        """The number of training samples."""
        return len(self.train.labels)

    @property
    def eval_samples(self) -> int:
        """The number of evaluation samples."""
        return len(self.evaluation.labels)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of an image."""
        return tuple(self.train.pixels.shape[1:])

    @property
    def vocabulary(self) -> int:
        """The number of classes."""
        return self.classes

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of the data, computed on first use."""
        return self.digest()

    def train_batch(self, indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Return images float32 (batch, 3, 32, 32) and labels int64 (batch,), augmented for this epoch."""
        pixels, labels = self.train.select(indices)
        draws = key(self.seed, AUGMENT, epoch)
        if self.crop:
            pixels = cropped(pixels, indices, draws)
        if self.flip:
            pixels = flipped(pixels, indices, draws)
        return self.normalise(pixels), labels

    def eval_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return images float32 (batch, 3, 32, 32) and labels int64 (batch,), not augmented."""
        pixels, labels = self.evaluation.select(indices)
        return self.normalise(pixels), labels


def cropped(pixels: Tensor, indices: Tensor, draws: int) -> Tensor:
    """Pad with 4 black pixels on every side, then cut 32x32 at a random position for each sample."""
    top = uniform_ints(draws, indices, DRAW_TOP, 2 * PADDING + 1)
    left = uniform_ints(draws, indices, DRAW_LEFT, 2 * PADDING + 1)
    batch, channels = pixels.shape[:2]
    padded = pixels.new_zeros(batch, channels, SIDE + 2 * PADDING, SIDE + 2 * PADDING)
    padded[:, :, PADDING:-PADDING, PADDING:-PADDING] = pixels
    windows = padded.unfold(2, SIDE, 1).unfold(3, SIDE, 1)  # (batch, 3, 9, 9, 32, 32), a view
    return windows[torch.arange(batch), :, top, left]  # (batch, 3, 32, 32)


def flipped(pixels: Tensor, indices: Tensor, draws: int) -> Tensor:
    """Mirror a random half of the samples left to right."""
    mirror = uniform_ints(draws, indices, DRAW_FLIP, 2) == 1
    return torch.where(mirror.view(-1, 1, 1, 1), pixels.flip(3), pixels)
