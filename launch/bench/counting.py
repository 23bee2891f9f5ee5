"""Count parameters, FLOPs, activations and optimizer state of a user's own model, in the ranks' Python.

This process therefore needs no torch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from muster.jobs.models.counted import Counted, read
from muster.launch.bench.ranks_python import ask

if TYPE_CHECKING:
    from muster.jobs.spec.job import Job
    from muster.jobs.spec.train import TrainSettings

TIMEOUT_S: Final = 300.0


@dataclass(frozen=True)
class OwnCode:
    """The counted model and optimizer of the user's code. A field is None if the code does not build that object."""

    model: Counted | None = None
    state_bytes: int | None = None  # optimizer state per parameter element


def own_code(job: "Job", settings: "TrainSettings", workdir: str | None = None) -> OwnCode:
    """Count the model and optimizer that the user's code builds, if the job names such code.

    `workdir` replaces the job's own working folder.

    Raises:
        RefusedError: if the code fails, or the ranks' Python has no torch.
    """
    if settings.model.make is None and settings.optimizer.make is None:
        return OwnCode()
    folder = workdir or job.workdir or str(Path.cwd())
    doing = "counting the user's model"
    record = ask(job, "muster.jobs.train.memory.meta", {}, folder=folder, timeout_s=TIMEOUT_S, doing=doing)
    return OwnCode(None if record["model"] is None else read(record["model"]), record["state_bytes"])
