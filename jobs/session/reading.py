"""Restore a state from a checkpoint, and allocate memory for the copies from which later checkpoints are written."""

import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.checkpoint.read import CheckpointReader
from muster.jobs.checkpoint.remote import NodesMemory
from muster.jobs.machine import linux
from muster.jobs.node import page
from muster.jobs.node.page import Phase
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.saving.memory import memory_run
from muster.jobs.saving.resume import LoadedCheckpoint, read_chosen
from muster.jobs.session.starting import SessionStart
from muster.jobs.session.together import OneRank

if TYPE_CHECKING:
    import torch

    from muster.jobs.saving.saver import Room
    from muster.jobs.session.state.state import State
    from muster.jobs.tensors.parts import TensorPart


@dataclass(frozen=True)
class Restored:
    """The number of steps done, and the position in an epoch if the program counts epochs."""

    step: int = 0
    progress: Mapping[str, int] = field(default_factory=dict)
    loaded: LoadedCheckpoint | None = None


def restore(start: SessionStart, state: "State", ranks: OneRank) -> Restored:
    """Fill a state from the checkpoint that the attempt resumes from, if there is one: a collective.

    Raises:
        RefusedError: if the ranks do not see the same checkpoint, or another program wrote it.
        NoCheckpointError, StorageError: if the checkpoint cannot be read.
    """
    if start.resume is None:
        return Restored()
    page.own.enter(Phase.LOAD)
    began_s = time.monotonic()
    run = (memory_run() if start.resume.memory else None) or start.run
    folder = CheckpointDir(run.checkpoints / start.resume.checkpoint)
    if ranks.world is None:
        manifest = read_chosen(folder, start.resume)
    else:
        from muster.jobs.tensors.reading import same_manifest

        manifest = same_manifest(folder, start.resume, ranks.world)
    with CheckpointReader(folder, manifest, remote=NodesMemory(folder) if start.resume.memory else None) as reader:
        state.load(manifest, reader, manifest.meta)
    loaded = LoadedCheckpoint(manifest.step, folder.name, time.monotonic() - began_s)
    return Restored(manifest.step, manifest.meta.get("progress") or {}, loaded)


def room_for(state: "State", device: "torch.device | None") -> "Callable[[Sequence[TensorPart]], Room[TensorPart]]":
    """Return a function that allocates memory for copies of a state's parts, on the CPU or on `device`."""
    if not state.has_tensors or device is None:
        return lambda parts: NoTensors()
    from muster.jobs.tensors.snapshot import MemorySnapshot

    return partial(MemorySnapshot, device=device)


class NoTensors:
    """Memory for a state with plain values only. It copies nothing and does not need torch."""

    is_complete = True

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.offsets: list[int] = []
        self.nbytes = 0
        self.descriptor = linux.memory_file("muster-snapshot", mmap.PAGESIZE)  # an empty file cannot be mapped

    def take(self, parts: Sequence[Any]) -> None:
        """Copy nothing."""

    def wait(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """Free the memory."""
        os.close(self.descriptor)
