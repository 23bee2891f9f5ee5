"""What a checkpoint is of: the settings that must stay equal between a save and a resume, and all else it is told.

Free to change are the number of ranks, the mode, the learning rate and its schedule, and how long to train.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from jobs.errors import RefusedError
from jobs.spec import TrainSettings
from jobs.train.data import Data
from jobs.train.sampling import Plan

RANDOMNESS: Final = "keyed-1"  # of jobs/train/keyed.py: another way to draw needs another name
KEPT: Final = "kept"
VIRTUAL_RANKS: Final = "train.virtual_ranks"  # 0: not exact


def kept_settings(settings: TrainSettings, data: Data, plan: Plan) -> dict[str, Any]:
    """Return what must stay equal, by the names that the job file has for it."""
    return {
        "train.model": settings.model.model_dump(mode="json", exclude_defaults=True),
        "train.precision": settings.precision,
        "train.optimizer.name": settings.optimizer.name,
        "train.data": {"name": data.name, "samples": data.train_samples, "sha256": data.fingerprint},
        "train.batch_size": plan.batch_size,
        "train.seed": settings.seed,
        VIRTUAL_RANKS: plan.virtual_ranks if settings.exact else 0,
        "randomness": RANDOMNESS,
    }


def require_kept(found: Any, wanted: Mapping[str, Any], where: str) -> None:
    """Compare what a checkpoint was saved with to what the job says now.

    Raises:
        RefusedError: they differ; names the first setting that does, what was found and what is wanted.
    """
    if not isinstance(found, Mapping):
        raise RefusedError(f"{where}: it does not say what it was saved with; it is not of this version of Muster")
    for name, now in wanted.items():
        before = found.get(name)
        if name == VIRTUAL_RANKS and not (before and now):
            continue  # exact or not is a way to compute; only one number of virtual ranks sums like another attempt's
        if before != now:
            raise RefusedError(
                f"{where}: it was saved with {name} {spelt(before)}, the job has {spelt(now)}; "
                "give the value it was saved with, or start a new run"
            )


def spelt(value: Any) -> str:
    """Spell a value for a message."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."


def meta_of(
    settings: TrainSettings,
    plan: Plan,
    kept: Mapping[str, Any],
    *,
    done: int,
    steps: int,
    world_size: int,
    parent: str | None,
    losses: Sequence[tuple[int, float]],
    aliases: Mapping[str, str],
) -> dict[str, Any]:
    """Return what a checkpoint after `done` steps says of itself beside its tensors."""
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
        "schedule": settings.schedule.model_dump(mode="json"),
        "job": hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest(),
        KEPT: dict(kept),
        "data": kept["train.data"]["sha256"],
        "world_size": world_size,
        "mode": settings.mode if settings.parallel is None else settings.parallel.sync,
        "parent": parent,
        "losses": list(losses),
        "aliases": dict(aliases),
        "torch": torch.__version__,
        "saved": time.time(),
    }
