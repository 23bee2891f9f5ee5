import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from muster.ddp import DataPartitioner
from muster.jobs.basics.errors import RefusedError
from muster.jobs.data import datafiles
from muster.jobs.data.cifar10 import prepare_cifar10
from muster.jobs.spec.train import TrainSettings
from muster.jobs.spec.train_fields import DATA_NAMES
from muster.jobs.train.data import OPENERS, open_data, require_batch
from muster.jobs.train.rng.keyed import AUGMENT, key, permutation


def settings(model: Any, data: Any, **others: Any) -> TrainSettings:
    return TrainSettings.model_validate({"model": model, "data": data, **others})


def digits_rows() -> Tensor:
    return torch.frombuffer(bytearray(datafiles.DIGITS.read_bytes()), dtype=torch.uint8).view(-1, 65)


@pytest.fixture
def cifar10(tiny_cifar10, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The tiny CIFAR-10, prepared on this machine."""
    (tmp_path / "source").write_bytes(tiny_cifar10.archive)
    prepare_cifar10(tmp_path / "data", url=(tmp_path / "source").as_uri(), md5=tiny_cifar10.md5)
    monkeypatch.setenv("MUSTER_DATA", str(tmp_path / "data"))
    return tiny_cifar10


def test_every_name_of_a_job_file_has_its_row():
    assert set(OPENERS) == {*DATA_NAMES, "text", "make"}


def test_digits_are_split_and_fingerprinted_as_the_attribution_says():
    data = open_data(settings("vgg11", "digits"))
    assert (data.train_samples, data.eval_samples, data.vocabulary) == (1437, 360, 10)
    assert (data.name, data.unit, data.units_per_sample) == ("digits", "samples", 1)
    assert data.fingerprint == hashlib.sha256(datafiles.DIGITS.read_bytes()).hexdigest()
    assert data.fingerprint in datafiles.DIGITS.with_name("ATTRIBUTION.md").read_text()


def test_digits_are_the_rows_of_the_file_each_pixel_four_by_four():
    data, rows = open_data(settings("vgg11", "digits")), digits_rows()
    for (images, labels), first in (
        (data.train_batch(torch.tensor([0, 700]), 3), 0),
        (data.eval_batch(torch.tensor([0, 359])), 1437),
    ):
        assert images.shape == (2, 3, 32, 32)
        assert images.dtype == torch.float32
        wanted = rows[[first, first + (700 if first == 0 else 359)]]
        assert labels.tolist() == wanted[:, 0].tolist()
        values = (images * 0.37550711 + 0.30538611) * 16
        blocks = values.view(2, 3, 8, 4, 8, 4)
        expected = wanted[:, 1:].view(2, 1, 8, 1, 8, 1).expand_as(blocks).float()
        torch.testing.assert_close(blocks, expected, atol=1e-4, rtol=0)


def test_the_training_digits_have_mean_0_and_deviation_1():
    data = open_data(settings("vgg11", "digits"))
    images, _ = data.train_batch(torch.arange(data.train_samples), 0)
    assert float(images.mean()) == pytest.approx(0.0, abs=1e-4)
    assert float(images.std()) == pytest.approx(1.0, abs=1e-4)


def test_digits_are_the_same_every_epoch_unless_augmentation_is_asked_for():
    plain, augmented = (open_data(settings("vgg11", "digits", augment=augment)) for augment in (None, True))
    indices = torch.arange(64)
    assert torch.equal(plain.train_batch(indices, 0)[0], plain.train_batch(indices, 1)[0])
    assert not torch.equal(augmented.train_batch(indices, 0)[0], augmented.train_batch(indices, 1)[0])
    assert torch.equal(plain.eval_batch(indices)[0], augmented.eval_batch(indices)[0])


def augmented_by_hand(image: Tensor, draws: int, sample: int, *, flip: bool) -> Tensor:
    """Crop and flip one image (3, 32, 32) of whole numbers, with draws in plain Python."""
    top, left = key(draws, 0, sample) % 9, key(draws, 1, sample) % 9
    cut = functional.pad(image, (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
    return cut.flip(2) if flip and key(draws, 2, sample) % 2 else cut


def test_augmented_digits_are_cropped_and_never_flipped():
    rows, data = digits_rows(), open_data(settings("vgg11", "digits", augment=True, seed=5))
    images, _ = data.train_batch(torch.arange(100, 140), 2)
    found = ((images * 0.37550711 + 0.30538611) * 16).round()
    for place, sample in enumerate(range(100, 140)):
        image = rows[sample, 1:].view(8, 8).repeat_interleave(4, 0).repeat_interleave(4, 1).expand(3, 32, 32)
        wanted = augmented_by_hand(image, key(5, AUGMENT, 2), sample, flip=False)
        assert torch.equal(found[place], wanted.float())


def cifar_image(rows: bytes, sample: int) -> Tensor:
    row = bytearray(rows[sample * 3073 + 1 : (sample + 1) * 3073])
    return torch.frombuffer(row, dtype=torch.uint8).view(3, 32, 32)


def in_pixels(images: Tensor) -> Tensor:
    mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
    std = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
    return ((images * std + mean) * 255).round()


def test_cifar10_is_cropped_and_flipped_by_default(cifar10):
    data = open_data(settings("vgg11", "cifar10", seed=3))
    assert (data.train_samples, data.eval_samples, data.vocabulary) == (20, 4, 10)
    flips = 0
    for epoch in range(3):
        images, labels = data.train_batch(torch.arange(20), epoch)
        draws = key(3, AUGMENT, epoch)
        flips += sum(key(draws, 2, sample) % 2 for sample in range(20))
        for sample, found in enumerate(in_pixels(images)):
            wanted = augmented_by_hand(cifar_image(cifar10.train_rows, sample), draws, sample, flip=True)
            assert torch.equal(found, wanted.float())
            assert int(labels[sample]) == cifar10.train_rows[sample * 3073]
    assert 15 < flips < 45


def test_cifar10_is_left_alone_when_told_so_and_in_evaluation(cifar10):
    data = open_data(settings("vgg11", "cifar10", augment=False))
    images, _ = data.train_batch(torch.tensor([19, 0]), 4)
    assert torch.equal(in_pixels(images)[0], cifar_image(cifar10.train_rows, 19).float())
    images, labels = data.eval_batch(torch.tensor([2]))
    assert torch.equal(in_pixels(images)[0], cifar_image(cifar10.test_rows, 2).float())
    assert labels.tolist() == [cifar10.test_rows[2 * 3073]]
    assert data.fingerprint == hashlib.sha256(cifar10.train_rows + cifar10.test_rows).hexdigest()


@pytest.mark.parametrize(
    ("model", "data"),
    [("vgg11", "digits"), ("vgg11", "cifar10"), ("vgg11", "synthetic"), ("gpt-nano", "synthetic")],
)
def test_a_sample_is_the_same_whatever_batch_it_is_read_in(model: str, data: str, cifar10):
    opened = open_data(settings(model, data, augment=True if model == "vgg11" else None))
    order = permutation(0, 1, 20)
    inputs, targets = opened.train_batch(order, 1)
    for start, stop in ((0, 1), (1, 8), (8, 20)):
        some_inputs, some_targets = opened.train_batch(order[start:stop], 1)
        assert torch.equal(some_inputs, inputs[start:stop])
        assert torch.equal(some_targets, targets[start:stop])


def test_a_partition_trains_on_the_first_part_and_evaluates_on_the_second(tmp_path: Path):
    whole = open_data(settings("vgg11", "digits"))
    data = open_data(settings("vgg11", {"name": "digits", "partition": [0.7, 0.2, 0.1], "seed": 5}))
    first, second, _ = DataPartitioner(range(1437), [0.7, 0.2, 0.1], seed=5).partitions
    assert (data.train_samples, data.eval_samples) == (1005, 287)
    indices = torch.tensor([0, 3, 200])
    for found, wanted in (
        (data.train_batch(indices, 0), whole.train_batch(torch.tensor(first)[indices], 0)),
        (data.eval_batch(indices), whole.train_batch(torch.tensor(second)[indices], 0)),
    ):
        assert all(map(torch.equal, found, wanted))
    alone = open_data(settings("vgg11", {"name": "synthetic", "partition": [0.001]}))
    assert (alone.train_samples, alone.eval_samples) == (50, 10_000)
    fingerprints = {whole.fingerprint, data.fingerprint}
    fingerprints.add(open_data(settings("vgg11", {"name": "digits", "partition": [0.7, 0.2, 0.1]})).fingerprint)
    assert len(fingerprints) == 3
    with pytest.raises(RefusedError, match=r"partition: \[0.5, 0.0001\] of 1437 samples leaves a part empty; use la"):
        open_data(settings("vgg11", {"name": "digits", "partition": [0.5, 0.0001]}))


def test_missing_cifar10_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUSTER_DATA", str(tmp_path))
    with pytest.raises(RefusedError, match="run: muster data cifar10"):
        open_data(settings("vgg11", "cifar10"))


def test_a_torn_cifar10_is_refused(cifar10, tmp_path: Path):
    path = tmp_path / "data" / "cifar10" / "train.u8"
    path.write_bytes(cifar10.train_rows[:-1])
    with pytest.raises(RefusedError, match=r"train\.u8: 61459 bytes are not whole rows of 3073"):
        open_data(settings("vgg11", "cifar10"))


def test_synthetic_images_have_cifar10_s_sizes_and_a_label_that_belongs_to_the_image():
    data = open_data(settings({"name": "vgg11", "vocabulary": 100}, "synthetic"))
    assert (data.train_samples, data.eval_samples, data.vocabulary) == (50_000, 10_000, 100)
    images, labels = data.train_batch(torch.arange(600), 0)
    label_of: dict[bytes, int] = {}
    for image, label in zip(images, labels.tolist(), strict=True):
        assert label_of.setdefault(bytes(image[0, 0].view(torch.uint8).tolist()), label) == label
    assert 100 < len(label_of) <= 256
    assert abs(float(images.mean())) < 0.02
    assert float(images.std()) == pytest.approx(1.0, abs=0.02)


def test_synthetic_tokens_take_vocabulary_and_context_of_the_model():
    data = open_data(settings({"name": "gpt-nano", "context": 33, "vocabulary": 7}, "synthetic"))
    assert (data.train_samples, data.eval_samples, data.vocabulary) == (8192, 512, 7)
    assert (data.unit, data.units_per_sample) == ("tokens", 33)
    inputs, targets = data.train_batch(torch.arange(50), 0)
    assert inputs.shape == targets.shape == (50, 33)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert set(inputs.flatten().tolist()) == set(range(7))
    assert not torch.equal(inputs, data.eval_batch(torch.arange(50))[0])


@given(content=st.binary(min_size=7, max_size=200), context=st.integers(1, 3))
def test_windows_cover_a_text_without_overlap(content: bytes, context: int):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text")
        path.write_bytes(content)
        data = open_data(settings({"name": "gpt-nano", "context": context}, {"text": str(path)}))
        train = data.train_batch(torch.arange(data.train_samples), 0)
        evaluation = data.eval_batch(torch.arange(data.eval_samples))
        windows = data.train_samples + data.eval_samples
        inputs, targets = (torch.cat(parts).flatten().tolist() for parts in zip(train, evaluation, strict=True))
        assert windows == (len(content) - 1) // context
        assert data.eval_samples == max(1, windows // 10)
        assert bytes(inputs) == content[: windows * context]
        assert bytes(targets) == content[1 : windows * context + 1]


def test_a_long_text_is_evaluated_on_windows_spread_over_its_last_tenth(tmp_path: Path):
    path = tmp_path / "text"
    path.write_bytes(np.arange(40_960 * 2 + 1).astype("<u2").tobytes())  # window i: the numbers 2i and 2i + 1
    model, text = {"name": "gpt-nano", "context": 4}, {"text": str(path)}
    some = open_data(settings(model, text))
    every = open_data(settings(model, text, evaluate="all"))
    assert (some.train_samples, some.eval_samples) == (36_864, 1024)
    assert (every.train_samples, every.eval_samples) == (36_864, 4096)
    assert torch.equal(some.eval_batch(torch.arange(1024))[0], every.eval_batch(torch.arange(0, 4096, 4))[0])
    first = every.eval_batch(torch.tensor([0]))[0][0, :2].tolist()
    assert first[0] + 256 * first[1] == (2 * 36_864) % 65_536


def test_a_text_is_fingerprinted_by_its_bytes_not_its_name(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"some text " * 100)
    found = {open_data(settings("gpt-nano", {"text": str(tmp_path / name)})).fingerprint for name in ("a", "b")}
    assert found == {hashlib.sha256(b"some text " * 100).hexdigest()}


def test_a_text_too_short_for_its_context_is_refused(tmp_path: Path):
    (tmp_path / "text").write_bytes(b"x" * 128)
    with pytest.raises(RefusedError, match="128 bytes are too few for a context of 64, which needs 129:"):
        open_data(settings("gpt-nano", {"text": str(tmp_path / "text")}))
    (tmp_path / "text").write_bytes(b"x" * 129)
    data = open_data(settings("gpt-nano", {"text": str(tmp_path / "text")}))
    assert (data.train_samples, data.eval_samples) == (1, 1)


def test_python_source_is_text_of_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUSTER_DATA", str(tmp_path))
    data = open_data(settings("gpt-nano", "python-source"))
    prepared = datafiles.prepare_python_source(tmp_path)
    inputs, _ = data.train_batch(torch.tensor([0]), 0)
    assert bytes(inputs[0].tolist()) == prepared.path.read_bytes()[:64]
    assert (data.vocabulary, data.units_per_sample, data.fingerprint) == (256, 64, prepared.sha256)


def test_a_batch_that_was_given_is_no_larger_than_the_data():
    few = open_data(settings("vgg11", "digits"))
    require_batch(settings("vgg11", "digits", batch_size=1437), few)
    with pytest.raises(
        RefusedError, match=r"batch_size: 1438 is larger than the training part of data digits; use at most 1437"
    ):
        require_batch(settings("vgg11", "digits", batch_size=1438), few)


def test_tokens_cannot_be_augmented():
    with pytest.raises(RefusedError, match="augment: true works only for images"):
        open_data(settings("gpt-nano", "synthetic", augment=True))
