"""`muster data NAME`: preparation of a data set on this machine, ready for training."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.errors import UnreachableError, UsageError
from muster.jobs.basics.reading import read_json
from muster.jobs.data import datafiles
from muster.jobs.spec.site import load_site
from muster.launch.common import screen
from muster.launch.common.options import add_json

Record = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = "muster data cifar10"
    parser.add_argument("name", choices=tuple(PREPARERS), help="the data set")
    parser.add_argument("--url", help="cifar10: URL of the archive (default: the official one)")
    parser.add_argument(
        "--archive", metavar="FILE", help="cifar10: a copy of the archive on this machine, instead of --url"
    )
    parser.add_argument("--md5", help="cifar10: MD5 checksum of the archive (default: of the official one)")
    parser.add_argument("--site", metavar="FILE", help="the site file; its key data names the folder")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prepare the data set if it is missing, and print its path.

    Raises:
        UsageError: if an option does not apply to the data set.
        RefusedError, UnreachableError, StorageError: if the data set cannot be downloaded or written.
    """
    record = {"name": args.name, **PREPARERS[args.name](args)}
    print(json.dumps(record, indent=2) if args.json else _line(record))
    return 0


def _cifar10(args: argparse.Namespace) -> Record:
    from muster.jobs.data.cifar10 import prepare_cifar10

    url = _archive(args) if args.archive else args.url or datafiles.CIFAR10_URL
    try:
        with _progress("cifar10") as progress:
            files = prepare_cifar10(_root(args), url=url, md5=args.md5 or datafiles.CIFAR10_MD5, progress=progress)
    except UnreachableError as error:
        archive = Path(datafiles.CIFAR10_URL).name
        raise UnreachableError(f"{error}; or without a network: muster data cifar10 --archive {archive}") from error
    meta = read_json(files.meta, owned=False)
    return {
        "samples": meta["train"]["samples"] + meta["test"]["samples"],
        "files": [_file(files.train, meta["train"]["sha256"]), _file(files.test, meta["test"]["sha256"])],
    }


def _root(args: argparse.Namespace) -> Path:
    """Return the folder where a run with this site file looks for data sets."""
    given = load_site(args.site).data
    return datafiles.data_root(os.environ if given is None else {**os.environ, datafiles.DATA_VARIABLE: given})


def _archive(args: argparse.Namespace) -> str:
    if args.url:
        raise UsageError("data cifar10: --archive and --url both name the archive; give one of them")
    path = Path(args.archive).expanduser().absolute()
    if not path.is_file():
        raise UsageError(f"--archive: {path}: no such file; give a copy of {Path(datafiles.CIFAR10_URL).name}")
    return path.as_uri()


def _python_source(args: argparse.Namespace) -> Record:
    _refuse_url(args)
    file = datafiles.prepare_python_source(_root(args))
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
    if args.url or args.archive or args.md5:
        raise UsageError(f"data {args.name}: --url, --archive and --md5 are for cifar10; leave them out")


def _file(path: Path, sha256: str) -> Record:
    return {"path": str(path), "bytes": path.stat().st_size, "sha256": sha256}


def _line(record: Record) -> str:
    size = sum(file["bytes"] for file in record["files"])
    samples = f"{record['samples']:,} samples, " if "samples" in record else ""
    return f"{record['name']}: {samples}{size / 2**20:.1f} MB in {Path(record['files'][0]['path']).parent}"


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int | None], None]]:
    """Yield a function that updates a progress bar; it does nothing unless standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen.live(), transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
