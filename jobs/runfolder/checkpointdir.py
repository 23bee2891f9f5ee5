"""Where the files of a checkpoint are: every path in its folder is spelt here only."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CheckpointDir:
    """The paths of one checkpoint."""

    path: Path

    @property
    def name(self) -> str:
        """The folder's name: steps and attempt."""
        return self.path.name

    def shard(self, writer: int) -> Path:
        """The tensors that one writer saves."""
        return self.path / f"shard-{writer:05d}.safetensors"

    def ok(self, writer: int) -> Path:
        """What one writer has written: its shard's size, sha256 and contents."""
        return self.path / f"shard-{writer:05d}.ok"

    @property
    def manifest(self) -> Path:
        """The commit: a checkpoint without it does not exist."""
        return self.path / "MANIFEST.json"

    @property
    def verified(self) -> Path:
        """Says that everything was read again after the commit and was right."""
        return self.path / "VERIFIED.json"

    @property
    def bad(self) -> Path:
        """Where it goes when it is found broken."""
        return self.path.with_name(f"bad-{self.path.name}")

    @property
    def trash(self) -> Path:
        """Where it goes to be deleted."""
        return self.path.with_name(f"trash-{self.path.name}")
