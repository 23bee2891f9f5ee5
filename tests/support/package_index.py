"""A package index on the loopback interface, with tiny wheels of our own."""

import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def wheel(name: str, version: str, files: dict[str, str], requires: str = "") -> bytes:
    """Build a wheel of some text files."""
    info = f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    texts = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*texts, f"{info}/RECORD"])
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path, text in {**texts, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)
    return packed.getvalue()


def sha256(data: bytes) -> str:
    """Return the hash as pip writes it."""
    return hashlib.sha256(data).hexdigest()


class PackageIndex:
    """An index under an address; it remembers which packages were asked for."""

    def __init__(self) -> None:
        self.wheels: dict[str, bytes] = {}  # by file name
        self.asked: list[str] = []
        self.address = ""

    def add(self, name: str, version: str, data: bytes) -> str:
        """Offer a wheel and return its hash."""
        self.wheels[f"{name}-{version}-py3-none-any.whl"] = data
        return sha256(data)

    def answer(self, path: str) -> bytes | None:
        """Return a page with links, or a wheel."""
        last = path.rstrip("/").rpartition("/")[2].replace("%2B", "+")
        if last in self.wheels:
            return self.wheels[last]
        self.asked.append(last)
        found = {name: data for name, data in self.wheels.items() if name.startswith(f"{last.replace('-', '_')}-")}
        links = (f'<a href="/files/{name}#sha256={sha256(data)}">{name}</a>' for name, data in found.items())
        return f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode() if found else None


@contextmanager
def serving(index: PackageIndex) -> Iterator[PackageIndex]:
    """Serve an index on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = index.answer(self.path)
            self.send_response(200 if body is not None else 404)
            self.send_header("Content-Type", "application/zip" if ".whl" in self.path else "text/html")
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    index.address = f"http://127.0.0.1:{server.server_address[1]}/simple"
    try:
        yield index
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
