"""`muster data NAME`: put a data set on this machine, ready for training."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.errors import UsageError
from muster.jobs.basics.reading import read_json
from muster.jobs.data import datafiles
from muster.launch.common import screen
from muster.launch.common.options import add_json

Record = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.epilog = "muster data cifar10"
    parser.add_argument("name", choices=tuple(PREPARERS), help="the data set")
    parser.add_argument("--url", help="cifar10: where the archive is, instead of its home")
    parser.add_argument("--md5", help="cifar10: the checksum of that archive, instead of the official one's")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prepare the data set, unless it is there, and say where it is.

    Raises:
        UsageError, RefusedError, UnreachableError, StorageError: as the preparers say.
    """
    record = {"name": args.name, **PREPARERS[args.name](args)}
    print(json.dumps(record, indent=2) if args.json else _line(record))
    return 0


def _cifar10(args: argparse.Namespace) -> Record:
    from muster.jobs.data.cifar10 import prepare_cifar10

    with _progress("cifar10") as progress:
        files = prepare_cifar10(
            datafiles.data_root(),
            url=args.url or datafiles.CIFAR10_URL,
            md5=args.md5 or datafiles.CIFAR10_MD5,
            progress=progress,
        )
    meta = read_json(files.meta, owned=False)
    return {
        "samples": meta["train"]["samples"] + meta["test"]["samples"],
        "files": [_file(files.train, meta["train"]["sha256"]), _file(files.test, meta["test"]["sha256"])],
    }


def _python_source(args: argparse.Namespace) -> Record:
    _refuse_url(args)
    file = datafiles.prepare_python_source(datafiles.data_root())
    return {"files": [_file(file.path, file.sha256)]}


def _digits(args: argparse.Namespace) -> Record:
    _refuse_url(args)
    path = datafiles.DIGITS
    return {"samples": path.stat().st_size // 65, "files": [_file(path, datafiles.sha256_of(path))]}


PREPARERS: Final[dict[str, Callable[[argparse.Namespace], Record]]] = {
    "digits": _digits,
    "cifar10": _cifar10,
    "python-source": _python_source,
}


def _refuse_url(args: argparse.Namespace) -> None:
    if args.url or args.md5:
        raise UsageError(f"data {args.name}: --url and --md5 are for cifar10; leave them out")


def _file(path: Path, sha256: str) -> Record:
    return {"path": str(path), "bytes": path.stat().st_size, "sha256": sha256}


def _line(record: Record) -> str:
    size = sum(file["bytes"] for file in record["files"])
    samples = f"{record['samples']:,} samples, " if "samples" in record else ""
    return f"{record['name']}: {samples}{size / 2**20:.1f} MB in {Path(record['files'][0]['path']).parent}"


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int | None], None]]:
    """Lend a progress bar on standard error when somebody is looking, else nothing."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen.live(), transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
