"""The kinds of job: the key in a job file, the type of its section, and the function that a rank runs.

`jobs/spec/load.py` gets this table as an argument, so that `jobs` does not depend on the packages in it.
"""

from typing import Final

from muster.collectives_bench.settings import BenchSettings
from muster.jobs.models.model_shape import resolve_shape
from muster.jobs.spec.conflicts import unread
from muster.jobs.spec.job import CommandSettings, JobKind
from muster.jobs.spec.train import TrainSettings
from muster.jobs.timing.settings import TimingSettings


def _check_train(settings: TrainSettings, world_size: int) -> None:
    settings.check(world_size)
    if settings.model.make is None:
        resolve_shape(settings.model, 1)  # any vocabulary size: only the ranks, which read the data, know it


def _check_timing(settings: TimingSettings, world_size: int) -> None:
    settings.check_world(world_size)
    for case in settings.cases():
        if not case.is_own:
            settings.shape(case)


KINDS: Final[tuple[JobKind, ...]] = (
    JobKind("train", TrainSettings, "muster.jobs.train.main:run_rank", _check_train, unread),
    JobKind("command", CommandSettings, None, lambda settings, world_size: None),
    JobKind("timing", TimingSettings, "muster.jobs.train.timing.run:run_rank", _check_timing),
    JobKind("bench", BenchSettings, "muster.collectives_bench.ranks.run:run_rank", BenchSettings.check_world),
)
BY_KEY: Final = {kind.key: kind for kind in KINDS}
