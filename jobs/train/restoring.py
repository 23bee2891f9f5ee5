"""Resume from a checkpoint: all ranks check that it is the same one and belongs to the job, and load its state.

Random states and the position in the data are not saved, because both follow from the number of steps.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from muster.jobs.checkpoint.read import CheckpointReader
from muster.jobs.checkpoint.remote import NodesMemory
from muster.jobs.node import page
from muster.jobs.node.page import Phase
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.saving.resume import LoadedCheckpoint, Resume
from muster.jobs.spec.kept import CODE, KEPT, require_kept
from muster.jobs.tensors.reading import PATIENCE_S, fill, same_manifest
from muster.jobs.train.data.loading import ShardInput
from muster.jobs.train.engine import Engine
from muster.jobs.world.world import World


def restore(
    run: RunDir,
    resume: Resume,
    engine: Engine,
    world: World,
    kept: Mapping[str, Any],
    first_shards: Sequence[ShardInput],
) -> LoadedCheckpoint:
    """Load a checkpoint into an engine: a collective.

    Raises:
        RefusedError: if the ranks do not see the same checkpoint, or it belongs to another job.
        NoCheckpointError, StorageError: if the checkpoint cannot be read.
    """
    page.own.enter(Phase.LOAD)
    began_s = time.monotonic()
    folder = CheckpointDir(run.checkpoints / resume.checkpoint)
    manifest = same_manifest(folder, resume, world)
    require_kept(manifest.meta.get(KEPT), kept, str(folder.path))
    engine.rehearse(first_shards)
    parts = engine.wanted_state({name: manifest.piece(name) for name in manifest.tensors})
    remote = NodesMemory(folder) if resume.memory else None
    with CheckpointReader(folder, manifest, patience_s=PATIENCE_S, remote=remote) as reader:
        for part in parts:
            fill(part, reader)
            page.own.beat()
    engine.replica.refresh()
    return LoadedCheckpoint(manifest.step, folder.name, time.monotonic() - began_s, manifest.meta.get(CODE))
