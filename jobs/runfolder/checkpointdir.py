"""The paths in the folder of one checkpoint."""

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
    # only in the memory of a node, written by its agent:
    complete = At("COMPLETE")  # every node has its part and that of another node
    failed = At("FAILED")  # a part of this node could not be copied; contains the reason
    nodes = Each("nodes-{:03d}.json")  # the nodes that have the shards, for the ranks of one attempt

    @property
    def name(self) -> str:
        """The name of the folder, which contains the step and the attempt."""
        return self.path.name

    @property
    def bad(self) -> Path:
        """The path to which a bad checkpoint is renamed."""
        return self.path.with_name(f"bad-{self.path.name}")

    @property
    def trash(self) -> Path:
        """The path to which the checkpoint is renamed before it is deleted."""
        return self.path.with_name(f"trash-{self.path.name}")
