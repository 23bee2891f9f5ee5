"""Download one file over HTTP, continuing a partial download, and check its MD5. Torch-free.

Bytes are appended to NAME.part, which is renamed to NAME only if its checksum is right.
"""

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.errors import RefusedError, UnreachableError, UsageError
from muster.jobs.data.datafiles import CHUNK_BYTES, storage_error

TIMEOUT_S: Final = 30.0
TRIES_WITHOUT_PROGRESS: Final = 3
SCHEMES: Final = ("https://", "http://", "file://")

Progress = Callable[[int, int | None], None]
"""Called with the bytes on disk and the total, which is None if the server does not send it."""


def download(url: str, path: Path, md5: str, progress: Progress = lambda done, total: None) -> None:
    """Download `url` to `path`. If `path`.part exists, continue from its end.

    Raises:
        UsageError: if the URL is invalid.
        UnreachableError: if the server cannot be reached or keeps closing the connection; partial data is kept.
        RefusedError: if the checksum is wrong; the file is then removed.
        StorageError: if the disk is full or the folder cannot be written.
    """
    if not url.startswith(SCHEMES):
        raise UsageError(f"--url: {url!r} must start with one of {', '.join(SCHEMES)}")
    part = path.with_name(path.name + ".part")
    best, failures = _size(part), 0
    while (reason := _fetch(url, part, progress)) is not None:
        failures = 0 if _size(part) > best else failures + 1
        best = max(best, _size(part))
        if failures == TRIES_WITHOUT_PROGRESS:
            kept = f" ({_size(part)} bytes are kept)" if _size(part) else ""
            raise UnreachableError(f"{url}: {reason}; check the network, then run this again to continue{kept}")
    found = md5_of(part)
    if found != md5:
        part.unlink()
        raise RefusedError(
            f"{url}: the file has md5 {found}, expected {md5}; it was removed; run this again, or give another "
            "--url or --md5"
        )
    part.replace(path)


def md5_of(path: Path) -> str:
    """Return the MD5 of a file in hex. An MD5 detects damage, but not attacks."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _fetch(url: str, part: Path, progress: Progress) -> str | None:
    """Request the missing bytes once and append them. Return the reason if bytes are still missing, else None."""
    have = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return _append(response, part, have, progress)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            return None  # the file is complete or too long; the checksum decides
        return f"the server answered {error.code} {error.reason}"
    except urllib.error.URLError as error:
        return _reason(error.reason)
    except (OSError, http.client.HTTPException) as error:
        return _reason(error)


def _append(response: Any, part: Path, have: int, progress: Progress) -> str | None:
    """Write a response after the first `have` bytes, or from the start if the server sends the whole file."""
    start = have if response.status == http.client.PARTIAL_CONTENT and _range_starts_at(response, have) else 0
    length = response.headers.get("Content-Length") or ""
    total = start + int(length) if length.isdecimal() else None
    done = start
    try:
        file = part.open("r+b" if start else "wb", buffering=0)
    except OSError as error:
        raise storage_error(part, error) from error
    with file:
        file.seek(start)
        while (total is None or done < total) and (chunk := response.read1(CHUNK_BYTES)):
            try:
                done += _write(file, chunk)
            except OSError as error:
                raise storage_error(part, error) from error
            progress(done, total)
    return None if total is None or done >= total else f"the connection was lost after {done} of {total} bytes"


def _write(file: Any, chunk: bytes) -> int:
    view = memoryview(chunk)
    while view:
        view = view[file.write(view) :]
    return len(chunk)


def _range_starts_at(response: Any, start: int) -> bool:
    """Return True if the server sends the requested range: `Content-Range: bytes START-END/TOTAL`."""
    return bool(response.headers.get("Content-Range", "").strip().startswith(f"bytes {start}-"))


def _reason(error: BaseException | str) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
