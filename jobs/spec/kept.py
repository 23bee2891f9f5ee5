"""The settings that must not change between a save and a resume, keyed by their names in the job file.

These may change: the number of ranks, the mode, the learning rate and its schedule, and the length of training.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.sections import changed
from muster.jobs.spec.expand import given_microbatches

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings

RANDOMNESS: Final = "keyed-1"  # version of jobs/train/rng/keyed.py; change it whenever the random numbers change
KEPT: Final = "kept"
DATA: Final = "train.data"
FREE: Final = ("units", "plan")  # keys of train.model that may change
CODE: Final = "code"  # the SHA-256 of the user's files; they may change
VIRTUAL_RANKS: Final = "train.virtual_ranks"  # the value is 0 if the job is not exact
MICROBATCHES: Final = "train.microbatches"  # of exact pipelines, else 0


def kept_settings(settings: "TrainSettings", *, samples: int, virtual_ranks: int) -> dict[str, Any]:
    """Return the settings that must not change, except those of the data, which only ranks can read.

    Args:
        samples: the number of samples in an epoch.
    """
    return {
        "train.model": {key: value for key, value in changed(settings.model).items() if key not in FREE},
        "train.precision": settings.precision,
        "train.loss": settings.loss,
        "train.optimizer.name": settings.optimizer.make or settings.optimizer.name,
        "train.batch_size": min(settings.batch_size, samples),
        "train.seed": settings.seed,
        VIRTUAL_RANKS: virtual_ranks if settings.exact else 0,
        MICROBATCHES: given_microbatches(settings) or 0 if settings.exact else 0,
        "randomness": RANDOMNESS,
    }


def require_settings(found: Any, settings: "TrainSettings", where: str) -> None:
    """Compare the settings of a checkpoint with those of a job that has not started.

    Raises:
        RefusedError: as for `require_kept`.
    """
    data = found.get(DATA) if isinstance(found, Mapping) else None
    samples = data.get("samples") if isinstance(data, Mapping) else None
    samples = samples if isinstance(samples, int) else settings.batch_size
    require_kept(found, kept_settings(settings, samples=samples, virtual_ranks=settings.virtual_world_size(1)), where)


def require_kept(found: Any, wanted: Mapping[str, Any], where: str) -> None:
    """Compare the settings of a checkpoint with those of the job.

    Raises:
        RefusedError: if a setting differs; the message has both values of the first such setting.
    """
    if not isinstance(found, Mapping):
        raise RefusedError(f"{where}: it does not list its settings, so another version of Muster wrote it")
    for name, now in wanted.items():
        before = found.get(name)
        # `exact` may change. If both jobs are exact, these must not change, because they set the order of sums.
        if name in (VIRTUAL_RANKS, MICROBATCHES) and not (before and now):
            continue
        if before != now:
            raise RefusedError(
                f"{where}: it was saved with {difference(name, before, now)}; set the saved value, or start a new run"
            )


def difference(name: str, before: Any, now: Any) -> str:
    """Describe how two values differ. For mappings, show only the keys that differ."""
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        return f"{name} {_spelt(before)}, but the job has {_spelt(now)}"
    keys = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    had = ", ".join(f"{name}.{key} {_spelt(before.get(key))}" for key in keys)
    has = ", ".join(_spelt(now.get(key)) for key in keys)
    return f"{had}, but the job has {has}"


def _spelt(value: Any) -> str:
    if value is None:
        return "by default"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."
