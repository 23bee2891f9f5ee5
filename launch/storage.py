"""Whether nodes see the run folder, and what is done where they do not: the agent sends home what its node writes.

A node sees the run folder when it reads there what the supervisor has just written. Else it keeps its part under the
same path, or in the temporary folder, and a Courier sends every new byte of it over the channel:

    node                                              supervisor
    RUN/attempt-000/rank-00003.out   ── file ──→      RUN/attempt-000/rank-00003.out
"""

import base64
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from jobs.errors import UnreachableError
from jobs.files import folder_error
from jobs.rundir import AttemptDir, RunDir
from jobs.trace.paths import FOR_HOME, PROFILE

CHUNK_BYTES: Final = 1 << 18
NAME: Final = re.compile(
    r"metrics\.jsonl|attempt-\d{3,}/(rank-\d{5,}\.(out|err)|(metrics|memory)-\d{5,}\.jsonl|bench\.jsonl|node-\d{2,}\.(json|setup)"
    rf"|{PROFILE}\d{{5,}}/(" + "|".join(map(re.escape, FOR_HOME)) + "))"
)


def find(run: RunDir, nonce: str) -> dict[str, str]:
    """Say where this node keeps the run: {"storage": "shared" | "apart" | "none", "run": path, "storage_why": text}."""
    try:
        shared = run.nonce("supervisor").read_text(encoding="utf-8").strip() == nonce
    except OSError:
        shared = False
    if shared:
        if os.access(run.path, os.W_OK | os.X_OK):
            return {"storage": "shared", "run": str(run.path), "storage_why": ""}
        return {"storage": "none", "run": "", "storage_why": f"{run.path}: cannot be written by this user"}
    why = ""
    for path in (run.path, Path(tempfile.gettempdir()) / f"muster-{os.getuid()}" / run.run_id):
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            why = why or str(folder_error(path, error))
            continue
        if os.access(path, os.W_OK | os.X_OK):
            return {"storage": "apart", "run": str(path), "storage_why": ""}
        why = why or f"{path}: cannot be written by this user"
    return {"storage": "none", "run": "", "storage_why": why}


class Courier:
    """Sends home what is new in a node's part of the run folder."""

    def __init__(self, run: RunDir, attempt: AttemptDir, node: int, ranks: Sequence[int]) -> None:
        self.run = run
        self.offsets: dict[Path, int] = {}
        self.files = [attempt.setup(node), attempt.node(node)]
        for rank in ranks:
            self.files += [attempt.out(rank), attempt.err(rank), attempt.metrics(rank), attempt.memory(rank)]
            self.files += attempt.profile(rank).for_home
        if 0 in ranks:
            self.files += [run.metrics, attempt.bench, attempt.timeline]

    def news(self) -> Iterator[dict[str, Any]]:
        """Yield one message per piece of a file that has grown since the last call."""
        for path in self.files:
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                continue
            offset = self.offsets.get(path, 0)
            if size <= offset:
                continue
            with path.open("rb") as file:
                file.seek(offset)
                while data := file.read(min(CHUNK_BYTES, size - offset)):
                    name = str(path.relative_to(self.run.path))
                    yield {"did": "file", "name": name, "offset": offset, "data": base64.b64encode(data).decode()}
                    offset += len(data)
                    self.offsets[path] = offset


def keep(run: RunDir, message: dict[str, Any]) -> None:
    """Write a piece of a file that a node has sent.

    Raises:
        UnreachableError: the node names a file that is not its to write.
        RunFolderError, StorageError: it cannot be written.
    """
    if not NAME.fullmatch(message["name"]):
        raise UnreachableError(f"its agent sent a file of another name: {message['name']!r}")
    path = run.path / message["name"]
    try:
        if path.parent.name.startswith(PROFILE):  # the folder of an attempt is there: it is made by who may
            path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(descriptor, base64.b64decode(message["data"]), message["offset"])
        finally:
            os.close(descriptor)
    except OSError as error:
        raise folder_error(path, error) from error
