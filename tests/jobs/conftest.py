"""Fixtures: an HTTP server that misbehaves on request, a tiny archive in CIFAR-10's format, warm processes."""

import hashlib
import io
import random
import struct
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from support.warm import Warm

PIXELS = 3072


@dataclass
class Served:
    """One URL, and the Range header of each request it got."""

    url: str
    ranges_asked: list[str | None] = field(default_factory=list)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Served]]:
    """Serve `body`; the first answers break off after `breaks[0]`, `breaks[1]`, ... bytes of theirs."""
    monkeypatch.setenv("no_proxy", "*")
    servers = []

    def start(body: bytes, *, ranges: bool = True, breaks: tuple[int, ...] = ()) -> Served:
        left = list(breaks)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = self.headers.get("Range")
                served.ranges_asked.append(asked)
                start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and ranges else 0
                if start >= len(body):
                    self.send_error(416)
                    return
                self.send_response(206 if start else 200)
                if start:
                    self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
                self.send_header("Content-Length", str(len(body) - start))
                self.end_headers()
                self.wfile.write(body[start : start + left.pop(0)] if left else body[start:])

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        served = Served(f"http://127.0.0.1:{server.server_address[1]}/archive.tar.gz")
        return served

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def python2_pickle(labels: list[int], pixels: bytes) -> bytes:
    """Write a batch with the opcodes that Python 2's pickle and numpy 1 wrote: byte strings, numpy.core names."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R"
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    shape = number(len(labels)) + number(PIXELS) + b"\x86"
    array += b"(" + number(1) + shape + dtype + b"\x89" + text(pixels) + b"tb"
    items = text(b"batch_label") + text(b"a batch") + text(b"labels") + b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + items + text(b"data") + array + b"u."


def python2_meta(names: list[bytes]) -> bytes:
    """Write batches.meta in the same way."""
    listed = b"".join(b"U" + bytes([len(name)]) + name for name in names)
    return b"\x80\x02}U\x0blabel_names](" + listed + b"es."


def pack(members: dict[str, bytes]) -> bytes:
    """Make a .tar.gz of files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@dataclass
class TinyCifar10:
    """An archive of six batches of four images, and the rows that it must become."""

    members: dict[str, bytes]
    train_rows: bytes
    test_rows: bytes

    @property
    def archive(self) -> bytes:
        return pack(self.members)

    @property
    def md5(self) -> str:
        return md5(self.archive)


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


@pytest.fixture
def tiny_cifar10(monkeypatch: pytest.MonkeyPatch) -> TinyCifar10:
    """Make the archive; the clock stands still so that packing it twice gives the same bytes."""
    monkeypatch.setattr("time.time", lambda: 1.0)  # gzip writes the time into its header
    draw = random.Random(0)
    members, rows = {}, []
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        labels, pixels = [draw.randrange(10) for _ in range(4)], draw.randbytes(4 * PIXELS)
        members[f"cifar-10-batches-py/{name}"] = python2_pickle(labels, pixels)
        rows.append(b"".join(bytes([label]) + pixels[i * PIXELS : (i + 1) * PIXELS] for i, label in enumerate(labels)))
    members["cifar-10-batches-py/batches.meta"] = python2_meta([b"airplane", b"automobile"])
    members["cifar-10-batches-py/readme.html"] = b"<html>"
    return TinyCifar10(members, b"".join(rows[:5]), rows[5])


@pytest.fixture
def make_warm(tmp_path: Path) -> Iterator[Callable[..., Warm]]:
    """Return a function that starts a warm process which imports nothing."""
    made: list[Warm] = []

    def make(rank_parents: int = 1, preload: str = "", code: str = "") -> Warm:
        made.append(Warm(tmp_path, rank_parents, preload, code))
        return made[-1]

    yield make
    for warm in made:
        warm.kill()


@pytest.fixture
def warm(make_warm: Callable[..., Warm]) -> Warm:
    """A warm process with one rank parent that is ready."""
    return make_warm().wait_for_rank_parents()
