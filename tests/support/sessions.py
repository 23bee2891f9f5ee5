"""A `State` saved and loaded through real shards, as ranks do it, without a writer process."""

from pathlib import Path
from typing import Any

import torch

from muster.jobs.checkpoint.commit import begin, commit
from muster.jobs.checkpoint.manifest import read_manifest
from muster.jobs.checkpoint.read import CheckpointReader
from muster.jobs.checkpoint.shard import write_shard
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.session.state.state import State
from muster.jobs.world.world import World

ALONE = World(0, 1, None, torch.device("cpu"))


def save(state: State, world: World, folder: str, step: int = 1) -> dict[str, Any]:
    """Write one rank's part; rank 0 commits. Return the meta, which is rank 0's."""
    run = RunDir(Path(folder))
    if world.rank == 0:
        run.attempt(0).path.mkdir(parents=True, exist_ok=True)
    world.meet()
    parts, meta = state.parts(), state.meta()
    pieces = [
        (part.piece, part.tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()) for part in parts
    ]
    checkpoint = begin(run, step, 0)
    write_shard(checkpoint, world.rank, world.size, pieces, meta=meta if world.rank == 0 else None)
    if world.rank == 0:
        commit(run, checkpoint, world.size, deadline_s=20.0)
    world.meet()
    return meta


def store(folder: Path, **objects: Any) -> State:
    """Save objects of one process."""
    state = State(objects)
    state.join(ALONE)
    save(state, ALONE, str(folder))
    return state


def restore(folder: Path, **objects: Any) -> State:
    """Load into the objects of one process."""
    state = State(objects)
    state.join(ALONE)
    load(state, str(folder))
    return state


def load(state: State, folder: str, step: int = 1) -> None:
    """Load the checkpoint of a step on this rank."""
    checkpoint = RunDir(Path(folder)).checkpoint(step, 0)
    manifest = read_manifest(checkpoint)
    with CheckpointReader(checkpoint, manifest) as reader:
        state.load(manifest, reader, manifest.meta)
