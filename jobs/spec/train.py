"""`train:` of a job file: its keys, checked against each other and against the number of ranks."""

from pydantic import model_validator
from typing_extensions import Self

from muster.jobs.spec.conflicts import conflict
from muster.jobs.spec.rules import TrainRules
from muster.jobs.spec.train_fields import TrainFields


class TrainSettings(TrainRules, TrainFields):
    """`train:` - a model, its data, how the work is split, and how long to train."""

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if why := conflict(self):
            raise ValueError(why)
        return self
