"""The image data sets: digits (shipped), cifar10 (downloaded), synthetic (random)."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from muster.ddp.partition import partitions
from muster.jobs.basics.errors import RefusedError
from muster.jobs.data import datafiles
from muster.jobs.train.data.images import SIDE, Images, ImageSet, Normalise
from muster.jobs.train.data.mapped import map_bytes
from muster.jobs.train.rng.keyed import SYNTHETIC, bits, key, uniform_ints

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings
    from muster.jobs.spec.train_fields import DataSettings

CLASSES: Final = 10
PIXELS: Final = 3 * SIDE * SIDE

DIGIT_ROW: Final = 1 + 64
DIGIT_TRAIN_SAMPLES: Final = 1437
# Mean and standard deviation of all pixels of the 1,437 training images, scaled from 0..16 to 0..1, for each of three
# equal channels.
DIGITS_NORM: Final = Normalise(16.0, (0.30538611,) * 3, (0.37550711,) * 3)
# Mean and standard deviation per channel of the 50,000 training images of CIFAR-10; the commonly used values.
CIFAR10_NORM: Final = Normalise(255.0, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
# Mean and standard deviation of uniform numbers in 0..1: mean 1/2, variance 1/12.
SYNTHETIC_NORM: Final = Normalise(255.0, (0.5,) * 3, (0.28867513,) * 3)

SYNTHETIC_TRAIN_SAMPLES: Final = 50_000
SYNTHETIC_EVAL_SAMPLES: Final = 10_000
SYNTHETIC_POOL: Final = 256
# Purposes of the random numbers under the key SYNTHETIC. The index is that of a pixel, image or sample.
DRAW_PIXELS, DRAW_LABEL, DRAW_TRAIN_ROW, DRAW_EVAL_ROW = range(4)


def open_digits(settings: "TrainSettings") -> Images:
    """Open the shipped 8x8 digits as 3x32x32 images. They are cropped randomly only with `augment: true`.

    They are never flipped, because most mirrored digits are not digits.
    """
    rows = map_bytes(datafiles.DIGITS).view(-1, DIGIT_ROW)
    small = rows[:, 1:].view(-1, 1, 8, 1, 8, 1)
    pixels = small.expand(-1, 3, 8, 4, 8, 4).reshape(-1, 3, SIDE, SIDE)  # (samples, 3, 32, 32): each pixel becomes 4x4
    labels = rows[:, 0]
    return Images(
        name="digits",
        train=ImageSet(pixels[:DIGIT_TRAIN_SAMPLES], labels[:DIGIT_TRAIN_SAMPLES]),
        evaluation=ImageSet(pixels[DIGIT_TRAIN_SAMPLES:], labels[DIGIT_TRAIN_SAMPLES:]),
        normalise=DIGITS_NORM,
        classes=CLASSES,
        seed=settings.seed,
        digest=lambda: datafiles.sha256_of(datafiles.DIGITS),
        crop=settings.augment is True,
    )


def open_cifar10(settings: "TrainSettings") -> Images:
    """Open CIFAR-10 (Krizhevsky 2009) as prepared by `muster data cifar10`; cropped and flipped by default.

    Raises:
        RefusedError: if the prepared files are not on this machine.
    """
    files = datafiles.cifar10_files(datafiles.data_root())
    augment = settings.augment is not False
    return Images(
        name="cifar10",
        train=_cifar10_part(files.train),
        evaluation=_cifar10_part(files.test),
        normalise=CIFAR10_NORM,
        classes=CLASSES,
        seed=settings.seed,
        digest=lambda: datafiles.sha256_of(files.train, files.test),
        crop=augment,
        flip=augment,
    )


def partitioned(images: Images, settings: "DataSettings") -> Images:
    """Return the data set of a job's `partition`; without one, the data set itself.

    Raises:
        RefusedError: if a part is empty.
    """
    if settings.partition is None:
        return images
    parts = partitions(images.train_samples, settings.partition, settings.seed)
    if not all(parts):
        raise RefusedError(
            f"train.data.partition: {settings.partition} of {images.train_samples} samples leaves a part empty; "
            "use larger shares"
        )
    train, held_out, *_ = (*map(images.train.part, parts), images.evaluation)

    def digest() -> str:
        return hashlib.sha256(f"{images.digest()} {settings.partition} {settings.seed}".encode()).hexdigest()

    return replace(images, train=train, evaluation=held_out, digest=digest)


def _cifar10_part(path: Path) -> ImageSet:
    rows = map_bytes(path)
    if len(rows) % (1 + PIXELS):
        raise RefusedError(
            f"{path}: {len(rows)} bytes are not whole rows of {1 + PIXELS}; delete {path.parent} and run muster data "
            "cifar10"
        )
    rows = rows.view(-1, 1 + PIXELS)
    return ImageSet(rows[:, 1:].view(-1, 3, SIDE, SIDE), rows[:, 0])  # views: nothing is read yet


def open_synthetic(settings: "TrainSettings") -> Images:
    """Generate a pool of labelled noise images, and draw as many samples from it as CIFAR-10 has."""
    classes = settings.model.vocabulary or CLASSES
    draws = key(SYNTHETIC)
    noise = bits(draws, torch.arange(SYNTHETIC_POOL * PIXELS), DRAW_PIXELS) & 0xFF
    pixels = noise.to(torch.uint8).view(SYNTHETIC_POOL, 3, SIDE, SIDE)
    label_of = uniform_ints(draws, torch.arange(SYNTHETIC_POOL), DRAW_LABEL, classes)

    def part(samples: int, draw: int) -> ImageSet:
        rows = uniform_ints(draws, torch.arange(samples), draw, SYNTHETIC_POOL)
        return ImageSet(pixels, label_of[rows], rows)

    description = f"synthetic images 1 {SYNTHETIC_TRAIN_SAMPLES} {SYNTHETIC_EVAL_SAMPLES} {SYNTHETIC_POOL} {classes}"
    return Images(
        name="synthetic",
        train=part(SYNTHETIC_TRAIN_SAMPLES, DRAW_TRAIN_ROW),
        evaluation=part(SYNTHETIC_EVAL_SAMPLES, DRAW_EVAL_ROW),
        normalise=SYNTHETIC_NORM,
        classes=classes,
        seed=settings.seed,
        digest=lambda: hashlib.sha256(description.encode()).hexdigest(),
        crop=settings.augment is True,
        flip=settings.augment is True,
    )
