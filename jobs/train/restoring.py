"""Resume from a checkpoint: every rank reads the same one, refuses one of another job, and loads its state.

There is no random state and no position in the data to restore: all random numbers are keyed by their step, so the
number of steps is enough.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from muster.jobs.checkpoint.read import Reader
from muster.jobs.node import page
from muster.jobs.node.page import Phase
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.saving.resume import Loaded, Resume
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
) -> Loaded:
    """Load a checkpoint into an engine: a collective.

    Raises:
        RefusedError: if the ranks do not see the same checkpoint, or it is of another job.
        NoCheckpointError, StorageError: if it cannot be read.
    """
    page.own.enter(Phase.LOAD)
    began_s = time.monotonic()
    folder = CheckpointDir(run.checkpoints / resume.checkpoint)
    manifest = same_manifest(folder, resume, world)
    require_kept(manifest.meta.get(KEPT), kept, str(folder.path))
    engine.rehearse(first_shards)
    parts = engine.wanted_state({name: manifest.piece(name) for name in manifest.tensors})
    with Reader(folder, manifest, patience_s=PATIENCE_S) as reader:
        for part in parts:
            fill(part, reader)
            page.own.beat()
    engine.replica.refresh()
    return Loaded(manifest.step, folder.name, time.monotonic() - began_s, manifest.meta.get(CODE))
