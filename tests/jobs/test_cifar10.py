import argparse
import hashlib
import io
import json
import os
import pickle
from pathlib import Path

import numpy
import pytest

from muster.jobs.basics.errors import RefusedError, StorageError, UnreachableError, UsageError
from muster.jobs.data.cifar10 import prepare_cifar10, read_batch
from muster.jobs.data.datafiles import locked
from muster.launch.commands import data as data_command


def prepare(root: Path, tiny) -> None:
    """Prepare from a local copy of a tiny archive."""
    source = root / "source.tar.gz"
    source.write_bytes(tiny.archive)
    prepare_cifar10(root / "data", url=source.as_uri(), md5=tiny.md5)


def test_an_archive_of_the_real_format_becomes_two_flat_files(serve, tiny_cifar10, tmp_path: Path):
    files = prepare_cifar10(tmp_path, url=serve(tiny_cifar10.archive).url, md5=tiny_cifar10.md5)
    assert files.train.read_bytes() == tiny_cifar10.train_rows
    assert files.test.read_bytes() == tiny_cifar10.test_rows
    meta = json.loads(files.meta.read_text())
    assert meta["train"] == {"samples": 20, "sha256": hashlib.sha256(tiny_cifar10.train_rows).hexdigest()}
    assert meta["test"] == {"samples": 4, "sha256": hashlib.sha256(tiny_cifar10.test_rows).hexdigest()}
    assert meta["labels"] == ["airplane", "automobile"]
    assert sorted(path.name for path in (tmp_path / "cifar10").iterdir()) == [
        ".lock",
        "meta.json",
        "test.u8",
        "train.u8",
    ]


def test_a_second_call_does_nothing(serve, tiny_cifar10, tmp_path: Path):
    served = serve(tiny_cifar10.archive)
    for _ in range(2):
        prepare_cifar10(tmp_path, url=served.url, md5=tiny_cifar10.md5)
    assert len(served.ranges_asked) == 1


def test_a_broken_download_is_resumed_by_the_second_call(serve, tiny_cifar10, tmp_path: Path):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "cifar-10-python.tar.gz.part").write_bytes(tiny_cifar10.archive[:100])
    served = serve(tiny_cifar10.archive)
    prepare_cifar10(tmp_path, url=served.url, md5=tiny_cifar10.md5)
    assert served.ranges_asked == ["bytes=100-"]


def test_two_commands_at_once_do_not_disturb_each_other(tiny_cifar10, tmp_path: Path):
    with (
        locked(tmp_path / "cifar10", wait_s=0.0),
        pytest.raises(StorageError, match="another process is preparing this data"),
    ):
        prepare_cifar10(tmp_path, url="https://127.0.0.1:1/never-asked", md5="0" * 32)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_arrays_pickled_by_the_numpy_of_today_are_read(order: str, protocol: int, tiny_cifar10, tmp_path: Path):
    array = numpy.asarray(numpy.arange(4 * 3072).reshape(4, 3072) % 251, dtype=numpy.uint8, order=order)
    batch = pickle.dumps({b"labels": [3, 1, 4, 1], b"data": array}, protocol=protocol)
    tiny_cifar10.members["cifar-10-batches-py/test_batch"] = batch
    prepare(tmp_path, tiny_cifar10)
    rows = numpy.frombuffer((tmp_path / "data/cifar10/test.u8").read_bytes(), numpy.uint8).reshape(4, 3073)
    assert rows[:, 0].tolist() == [3, 1, 4, 1]
    assert (rows[:, 1:] == array).all()


class Evil:
    """Pickles as a call of any function."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def test_a_hostile_pickle_is_refused_by_name_and_nothing_is_run(tiny_cifar10, tmp_path: Path):
    made = tmp_path / "made-by-the-pickle"
    batch = pickle.dumps({b"labels": [], b"data": Evil(os.mkdir, str(made))}, protocol=2)
    tiny_cifar10.members["cifar-10-batches-py/data_batch_1"] = batch
    with pytest.raises(RefusedError, match=r"data_batch_1: the pickle names posix\.mkdir"):
        prepare(tmp_path, tiny_cifar10)
    assert not made.exists()
    assert not (tmp_path / "data/cifar10/meta.json").exists()


@pytest.mark.parametrize("function", [eval, getattr, io.open, bytearray, pickle.loads])
def test_no_function_but_those_of_an_array_can_be_named(function: object):
    stream = io.BytesIO(pickle.dumps(Evil(function, "1"), protocol=2))
    with pytest.raises(RefusedError, match="which no batch of CIFAR-10 needs"):
        read_batch(stream, "here")


def test_names_of_the_archive_are_never_used_as_paths(tiny_cifar10, tmp_path: Path):
    root = tmp_path / "root"
    root.mkdir()
    tiny_cifar10.members = {f"../../{name.rsplit('/')[-1]}": body for name, body in tiny_cifar10.members.items()}
    prepare(root, tiny_cifar10)
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    assert sorted(path.name for path in root.iterdir()) == ["data", "source.tar.gz"]
    assert sorted(path.name for path in (root / "data").iterdir()) == ["cifar10"]


def batch_of(array: object) -> bytes:
    return pickle.dumps({b"labels": [0] * 4, b"data": array}, protocol=2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a pickle", "test_batch: .*not a batch"),
        (pickle.dumps([1, 2], protocol=2), "test_batch: .*found list, expected a dict"),
        (pickle.dumps({b"labels": [1]}, protocol=2), "test_batch: .*expected labels and data"),
        (batch_of(numpy.zeros((3, 3072), numpy.uint8)), r"4 labels, but data is \(3, 3072\)"),
        (None, "test_batch missing"),
    ],
    ids=["no pickle", "a list", "no data", "too few images", "no batch"],
)
def test_a_damaged_batch_is_refused_where_it_is(content: bytes | None, message: str, tiny_cifar10, tmp_path: Path):
    del tiny_cifar10.members["cifar-10-batches-py/test_batch"]
    if content is not None:
        tiny_cifar10.members["cifar-10-batches-py/test_batch"] = content
    with pytest.raises(RefusedError, match=message):
        prepare(tmp_path, tiny_cifar10)


@pytest.mark.parametrize(
    "damage", [lambda body: b"hello", lambda body: body[:500], lambda body: body[:500] + body[501:]]
)
def test_what_is_no_whole_archive_is_refused(damage, tiny_cifar10, tmp_path: Path):
    body = damage(tiny_cifar10.archive)
    (tmp_path / "source").write_bytes(body)
    with pytest.raises(RefusedError, match=r"not the archive of CIFAR-10|not a batch of CIFAR-10"):
        prepare_cifar10(tmp_path, url=(tmp_path / "source").as_uri(), md5=hashlib.md5(body).hexdigest())


def test_the_command_reads_a_local_archive(tiny_cifar10, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("MUSTER_DATA", str(tmp_path))
    (tmp_path / "copy of it.tar.gz").write_bytes(tiny_cifar10.archive)
    parser = argparse.ArgumentParser()
    data_command.configure(parser)
    given = ["cifar10", "--archive", str(tmp_path / "copy of it.tar.gz"), "--md5", tiny_cifar10.md5]
    assert data_command.run(parser.parse_args(given)) == 0
    assert "24 samples" in capsys.readouterr().out
    for wrong, message in (
        (["cifar10", "--archive", "none.tar.gz"], "none.tar.gz: no such file; give a copy of cifar-10-python.tar.gz"),
        ([*given, "--url", "file:///x"], "--archive and --url both name the archive; give one of them"),
        (["digits", "--archive", "x"], "--url, --archive and --md5 are for cifar10; leave them out"),
    ):
        with pytest.raises(UsageError, match=message):
            data_command.run(parser.parse_args(wrong))


def test_without_a_network_the_command_names_the_archive(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MUSTER_DATA", str(tmp_path))
    parser = argparse.ArgumentParser()
    data_command.configure(parser)
    with pytest.raises(UnreachableError, match=r"muster data cifar10 --archive cifar-10-python\.tar\.gz"):
        data_command.run(parser.parse_args(["cifar10", "--url", "http://127.0.0.1:9/x.tar.gz"]))


def test_the_command_prints_where_the_data_is(serve, tiny_cifar10, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("MUSTER_DATA", str(tmp_path))
    parser = argparse.ArgumentParser()
    data_command.configure(parser)
    given = ["cifar10", "--url", serve(tiny_cifar10.archive).url, "--md5", tiny_cifar10.md5]
    assert data_command.run(parser.parse_args(given)) == 0
    assert capsys.readouterr().out == f"cifar10: 24 samples, 0.1 MB in {tmp_path / 'cifar10'}\n"
    assert data_command.run(parser.parse_args([*given, "--json"])) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["samples"] == 24
    assert record["files"][1]["sha256"] == hashlib.sha256(tiny_cifar10.test_rows).hexdigest()


def test_the_command_writes_where_a_run_with_that_site_file_reads(tiny_cifar10, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("MUSTER_DATA", str(tmp_path / "elsewhere"))
    (tmp_path / "archive").write_bytes(tiny_cifar10.archive)
    (tmp_path / "site.yaml").write_text(f"data: {tmp_path / 'shared'}\n")
    parser = argparse.ArgumentParser()
    data_command.configure(parser)
    given = ["cifar10", "--archive", str(tmp_path / "archive"), "--md5", tiny_cifar10.md5]
    assert data_command.run(parser.parse_args([*given, "--site", str(tmp_path / "site.yaml")])) == 0
    assert capsys.readouterr().out == f"cifar10: 24 samples, 0.1 MB in {tmp_path / 'shared' / 'cifar10'}\n"
    assert not (tmp_path / "elsewhere").exists()
