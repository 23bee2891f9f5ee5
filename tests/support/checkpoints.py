"""Runs with checkpoints in them, saved by the real writer small tensors whose every byte follows from the step."""

import hashlib
from pathlib import Path
from typing import Any

from muster.jobs.basics.files import write_json
from muster.jobs.checkpoint import commit
from muster.jobs.checkpoint.manifest import CheckpointManifest
from muster.jobs.checkpoint.pieces import Piece, whole
from muster.jobs.checkpoint.read import CheckpointReader
from muster.jobs.checkpoint.shard import write_shard
from muster.jobs.node.reports import Reporter
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir

SHAPE = (6, 4)


def content(step: int, name: str, size: int) -> bytes:
    """Return bytes that belong to one step and one tensor."""
    return hashlib.shake_128(f"{step} {name}".encode()).digest(size)


def damage(path: Path, at: int = -1) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class Saved:
    """A run folder that tests fill with checkpoints."""

    def __init__(self, path: Path) -> None:
        self.run = RunDir(path)
        self.run.path.mkdir()
        self.said: list[str] = []
        self.meta: dict[str, Any] = {}  # what is told beside step and losses
        self.attempt(0)

    def attempt(self, number: int, begun: str | None = "unsaid", step: int = 0) -> None:
        """Begin an attempt; `begun` is the checkpoint that it says it began from."""
        self.run.attempt(number).path.mkdir(exist_ok=True)
        if begun != "unsaid":
            write_json(self.run.attempt(number).resume, {"checkpoint": begun, "step": step})

    def write(self, step: int, attempt: int = 0, writers: tuple[int, ...] = (0, 1)) -> CheckpointDir:
        """Write shards and no manifest: a matrix cut in two boxes, a flat one cut in two ranges, a whole one."""
        folder = commit.begin(self.run, step, attempt)
        split, flat = content(step, "model/split", 96), content(step, "model/flat", 96)
        pieces = [
            [
                (whole("model/whole", "U8", (5,)), content(step, "model/whole", 5)),
                (Piece("model/split", "F32", SHAPE, box=((0, 2), (0, 4))), split[:32]),
                (Piece("model/flat", "F32", SHAPE, flat=(0, 7)), flat[:28]),
            ],
            [
                (Piece("model/split", "F32", SHAPE, box=((2, 6), (0, 4))), split[32:]),
                (Piece("model/flat", "F32", SHAPE, flat=(7, 24)), flat[28:]),
                (whole("optimizer/whole/step", "I64", ()), content(step, "optimizer/whole/step", 8)),
            ],
        ]
        for writer in writers:
            meta = {"step": step, "losses": [[step, 1.5]], **self.meta}
            write_shard(folder, writer, 2, pieces[writer], meta=meta)
        return folder

    def save(self, step: int, attempt: int = 0) -> CheckpointDir:
        """Make a committed checkpoint."""
        folder = self.write(step, attempt)
        commit.commit(self.run, folder, 2)
        return folder

    def save_all(self, *steps: int, attempt: int = 0) -> None:
        """Make several checkpoints."""
        for step in steps:
            self.save(step, attempt)

    def names(self) -> list[str]:
        """List the folders there are."""
        return sorted(entry.name for entry in self.run.checkpoints.iterdir())

    def say(self, text: str) -> None:
        """Remember what was said."""
        self.said.append(text)

    @staticmethod
    def holds(folder: CheckpointDir, manifest: CheckpointManifest) -> bool:
        """Say whether every tensor has the bytes of the manifest's step."""
        with CheckpointReader(folder, manifest) as reader:
            for name in reader.names():
                buffer = bytearray(reader.piece(name).nbytes)
                reader.read_into(reader.piece(name), buffer)
                if bytes(buffer) != content(manifest.step, name, len(buffer)):
                    return False
        return reader.names() == ["model/flat", "model/split", "model/whole", "optimizer/whole/step"]


class Told(Reporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__({})
        self.rows: list[dict[str, Any]] = []

    def _send(self, report: dict[str, Any]) -> None:
        self.rows.append(report)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["report"] == kind]
