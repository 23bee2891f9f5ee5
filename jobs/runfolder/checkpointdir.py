"""Where the files of a checkpoint are: every path in its folder is spelt here only."""

from dataclasses import dataclass
from pathlib import Path

from muster.jobs.basics.places import At, Each


@dataclass(frozen=True)
class CheckpointDir:
    """The paths of one checkpoint."""

    path: Path

    shard = Each("shard-{:05d}.safetensors")  # the tensors that one writer saves
    ok = Each("shard-{:05d}.ok")  # what one writer has written: its shard's size, sha256 and contents
    manifest = At("MANIFEST.json")  # the commit: a checkpoint without it does not exist
    verified = At("VERIFIED.json")  # says that everything was read again after the commit and was right

    @property
    def name(self) -> str:
        """The folder's name: steps and attempt."""
        return self.path.name

    @property
    def bad(self) -> Path:
        """Where it goes when it is found broken."""
        return self.path.with_name(f"bad-{self.path.name}")

    @property
    def trash(self) -> Path:
        """Where it goes to be deleted."""
        return self.path.with_name(f"trash-{self.path.name}")
