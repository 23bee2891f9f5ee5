"""The paths in the folder of a checkpoint; no other module spells them."""

from dataclasses import dataclass
from pathlib import Path

from muster.jobs.basics.places import At, Each


@dataclass(frozen=True)
class CheckpointDir:
    """The paths of one checkpoint."""

    path: Path

    shard = Each("shard-{:05d}.safetensors")  # the tensors of one writer
    ok = Each("shard-{:05d}.ok")  # marks the shard of one writer as complete: its size, sha256 and contents
    manifest = At("MANIFEST.json")  # the commit: a checkpoint without it does not exist
    verified = At("VERIFIED.json")  # records that all files were read again after the commit and were correct

    @property
    def name(self) -> str:
        """The name of the folder, made of step and attempt."""
        return self.path.name

    @property
    def bad(self) -> Path:
        """The path to rename it to if it is bad."""
        return self.path.with_name(f"bad-{self.path.name}")

    @property
    def trash(self) -> Path:
        """The path to rename it to before it is deleted."""
        return self.path.with_name(f"trash-{self.path.name}")
