"""Convert the python-version archive of CIFAR-10 (Krizhevsky 2009) to two flat files, without torch and numpy.

The archive contains pickles, and a pickle may call any function that it names. This reader calls only the functions in
`_ALLOWED`, which are substitutes for the four that a pickled numpy array needs. A pickle with any other name is
refused. Paths in the archive are never written to.
"""

import codecs
import io
import pickle
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from muster.jobs.basics.errors import RefusedError
from muster.jobs.data.datafiles import (
    CIFAR10_MD5,
    CIFAR10_URL,
    Cifar10Files,
    cifar10_files,
    locked,
    sha256_of,
    write_facts,
    written,
)
from muster.jobs.data.download import Progress, download, md5_of

PIXELS: Final = 3072
CLASSES: Final = 10
TRAIN_BATCHES: Final = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCH: Final = "test_batch"
META: Final = "batches.meta"
LARGEST_MEMBER_BYTES: Final = 2**26  # a batch of 10,000 images is 31 MB


def prepare_cifar10(
    root: Path, *, url: str = CIFAR10_URL, md5: str = CIFAR10_MD5, progress: Progress = lambda done, total: None
) -> Cifar10Files:
    """Download, check and convert CIFAR-10, unless that was done before; return its files.

    Raises:
        UnreachableError, UsageError: as for `download`.
        RefusedError: if the checksum or the contents of the archive are wrong.
        StorageError: if a file cannot be written, or another process is preparing the data.
    """
    try:
        return cifar10_files(root)
    except RefusedError:
        pass
    folder = root / "cifar10"
    with locked(folder, wait_s=0.0):
        archive = folder / "cifar-10-python.tar.gz"
        if not (archive.is_file() and md5_of(archive) == md5):
            download(url, archive, md5, progress)
        _convert(archive, folder, {"source": url, "md5": md5})
        archive.unlink(missing_ok=True)
    return cifar10_files(root)


def _convert(archive: Path, folder: Path, facts: dict[str, Any]) -> None:
    batches = _read_members(archive)
    parts = {"train": TRAIN_BATCHES, "test": (TEST_BATCH,)}
    for part, names in parts.items():
        path = folder / f"{part}.u8"
        rows = [_rows(batches[name], f"{archive}: {name}") for name in names]
        with written(path) as temporary, temporary.open("wb") as file:
            file.writelines(rows)
        samples = sum(map(len, rows)) // (1 + PIXELS)
        facts[part] = {"samples": samples, "sha256": sha256_of(path)}
    names = batches[META].get(b"label_names", [])
    facts["labels"] = [name.decode("utf-8", "replace") for name in names if isinstance(name, bytes)]
    write_facts(folder / "meta.json", facts)


def _read_members(archive: Path) -> dict[str, dict[Any, Any]]:
    """Read the batches, found by the last part of their names; ignore everything else in the archive."""
    wanted = {*TRAIN_BATCHES, TEST_BATCH, META}
    found: dict[str, dict[Any, Any]] = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = member.name.rsplit("/", 1)[-1]
                if name not in wanted or name in found or not member.isfile():
                    continue
                if member.size > LARGEST_MEMBER_BYTES:
                    raise RefusedError(f"{archive}: {name} has {member.size} bytes, more than any batch of CIFAR-10")
                file = tar.extractfile(member)
                assert file is not None
                found[name] = read_batch(file, f"{archive}: {name}")
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise RefusedError(f"{archive}: not the archive of CIFAR-10: {error}; delete it and run this again") from error
    if missing := sorted(wanted - found.keys()):
        raise RefusedError(f"{archive}: not the archive of CIFAR-10: {', '.join(missing)} missing")
    return found


def read_batch(file: IO[bytes], where: str) -> dict[Any, Any]:
    """Read one pickled batch. Strings pickled by Python 2 become bytes.

    Raises:
        RefusedError: if the pickle names a function that no batch needs, or is not a batch.
    """
    try:
        batch = _BatchUnpickler(io.BytesIO(file.read()), where).load()
    except RefusedError:
        raise
    except Exception as error:  # a hostile or damaged pickle may raise anything
        raise RefusedError(f"{where}: not a batch of CIFAR-10: {error}") from error
    if not isinstance(batch, dict):
        raise RefusedError(f"{where}: not a batch of CIFAR-10: found {type(batch).__name__}, expected a dict")
    return batch


@dataclass
class _DType:
    """A substitute for numpy.dtype that supports only unsigned bytes, because a batch needs nothing else."""

    code: Any
    align: Any = False
    copy: Any = False

    def __setstate__(self, state: Any) -> None:
        if self.code not in ("u1", b"u1"):
            raise ValueError(f"found an array of type {self.code!r}, expected u1")


class _Array:
    """A substitute for numpy.ndarray: a shape and its bytes, in column order if `by_columns`."""

    shape: tuple[int, ...] = ()
    by_columns: bool = False
    data: bytes = b""

    def __setstate__(self, state: Any) -> None:
        _version, self.shape, dtype, self.by_columns, self.data = state
        if not isinstance(dtype, _DType) or not isinstance(self.data, bytes):
            raise ValueError("found an array that is not plain bytes")


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    """Return an empty array: a substitute for the numpy function of this name."""
    return _Array()


def _encode(text: Any, encoding: Any = "") -> bytes:
    """Encode latin-1 text: a substitute for codecs.encode, which protocol-2 pickles of Python 3 call."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise ValueError(f"found text in {encoding!r}, expected latin1")
    return codecs.latin_1_encode(text)[0]


_ALLOWED: Final[dict[tuple[str, str], Callable[..., Any]]] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,  # numpy 1
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,  # numpy 2
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
    ("_codecs", "encode"): _encode,
}


class _BatchUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], where: str) -> None:
        super().__init__(file, encoding="bytes")
        self.where = where

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise RefusedError(
                f"{self.where}: the pickle names {module}.{name}, which no batch of CIFAR-10 needs; "
                "the function was not called; do not trust this file"
            ) from None


def _rows(batch: dict[Any, Any], where: str) -> bytes:
    """Return the rows of a batch: a label byte, then the pixels.

    Raises:
        RefusedError: if labels or images are missing, or their numbers differ.
    """
    labels, array = batch.get(b"labels", batch.get("labels")), batch.get(b"data", batch.get("data"))
    if not isinstance(labels, list) or not isinstance(array, _Array):
        raise RefusedError(f"{where}: not a batch of CIFAR-10: expected labels and data, found {list(batch)!r:.80}")
    samples = len(labels)
    if array.shape != (samples, PIXELS) or len(array.data) != samples * PIXELS:
        raise RefusedError(f"{where}: {samples} labels, but data is {array.shape}; expected ({samples}, {PIXELS})")
    if not all(isinstance(label, int) and 0 <= label < CLASSES for label in labels):
        raise RefusedError(f"{where}: labels must be 0..{CLASSES - 1}")
    # In column order, row i has every `samples`-th byte, beginning with byte i. In row order, it is one slice.
    pieces = [
        slice(i, None, samples) if array.by_columns else slice(i * PIXELS, (i + 1) * PIXELS) for i in range(samples)
    ]
    return b"".join(bytes([label]) + array.data[piece] for label, piece in zip(labels, pieces, strict=True))
