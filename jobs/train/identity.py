"""The metadata of a checkpoint; `jobs/spec/kept.py` defines which settings in it must not change before a resume."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from muster.jobs.basics.sections import values
from muster.jobs.spec.kept import CODE, DATA, KEPT, RANDOMNESS, kept_settings
from muster.jobs.train.data import Data
from muster.jobs.train.data.sampling import Plan

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings


def kept_of(settings: "TrainSettings", data: Data, plan: Plan) -> dict[str, Any]:
    """Return the settings that must not change between a save and a resume, including the data."""
    kept = kept_settings(settings, samples=data.train_samples, virtual_ranks=plan.virtual_ranks)
    return {**kept, DATA: {"name": data.name, "samples": data.train_samples, "sha256": data.fingerprint}}


def meta_of(
    settings: "TrainSettings",
    plan: Plan,
    kept: Mapping[str, Any],
    *,
    done: int,
    steps: int,
    world_size: int,
    parent: str | None,
    losses: Sequence[tuple[int, float]],
    aliases: Mapping[str, str],
    code: Mapping[str, str],
) -> dict[str, Any]:
    """Return the metadata of a checkpoint after `done` steps."""
    epoch, index = divmod(done, plan.steps_per_epoch)
    return {
        "step": done,
        "steps": steps,
        "samples": epoch * plan.samples + min(index * plan.batch_size, plan.samples),
        "epoch": epoch,
        "seed": settings.seed,
        "randomness": RANDOMNESS,
        "batch_size": plan.batch_size,
        "virtual_ranks": plan.virtual_ranks,
        "schedule": values(settings.schedule),
        "job": hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest(),
        KEPT: dict(kept),
        "data": kept[DATA]["sha256"],
        "world_size": world_size,
        "mode": settings.mode_name,
        "parent": parent,
        "losses": list(losses),
        "aliases": dict(aliases),
        CODE: dict(code),
        "torch": torch.__version__,
        "saved": time.time(),
    }
