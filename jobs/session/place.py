"""Read this process's rank, its launcher and the settings of its run from the environment."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from muster.jobs.hosts import ranks
from muster.jobs.hosts.detect import Flags, detect
from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.node import page
from muster.jobs.node.page import Page
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.saving.policy import PlainPolicy
from muster.jobs.saving.resume import Resume

TORCHRUN: Final = "torchrun"
MEETING: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankPlace:
    """A rank, its launcher, and the settings of its run.

    `run` is the run folder if the launcher created it; otherwise rank 0 creates one. `watched`: an agent watches this
    process through a shared page, stops it through that page, and has chosen the checkpoint to resume from. `saves` is
    False if the nodes share no run folder.
    """

    env: RankEnv
    launcher: str
    name: str
    policy: PlainPolicy
    run: RunDir | None = None
    attempt: int = 0
    resume: Resume | None = None
    hang_s: float | None = None
    saves: bool = True
    watched: bool = False


def read_place(environ: Mapping[str, str] = os.environ, name: str | None = None) -> RankPlace:
    """Detect this process's launcher, read its rank and settings, and attach the page of an agent.

    Raises:
        RefusedError: if a launcher's variables contradict each other.
    """
    found = detect(environ, Flags())
    told: Mapping[str, Any] = json.loads(environ.get(ranks.SESSION, "{}"))
    descriptor = ranks.inherited(environ, ranks.PAGE)
    watched = descriptor is not None and bool(told)
    if descriptor is not None and watched:
        page.own = Page.attach(descriptor)
    return RankPlace(
        env=found.env,
        launcher=found.launcher,
        name=name or told.get("job") or script_name(),
        policy=PlainPolicy.read(told.get("checkpoint") or {}),
        run=RunDir(Path(found.env.run_dir)) if told and found.env.run_dir else None,
        attempt=told.get("attempt", found.env.attempt),
        resume=Resume.read(told.get("resume")) if watched else None,
        hang_s=told.get("hang_s"),
        saves=told.get("saving", True),
        watched=watched,
    )


def meeting_variables(place: RankPlace) -> dict[str, str]:
    """Return the variables for init_process_group(), for a program started by srun, mpirun or the user."""
    variables = place.env.variables()
    if place.env.world_size == 1:
        variables["MASTER_PORT"] = "0"  # any free port
    return {name: variables[name] for name in MEETING}


def script_name() -> str:
    """Return the name of the running program as a valid run name."""
    stem = Path(sys.argv[0] or "python").stem
    return "".join(each if each.isalnum() and each.isascii() else "-" for each in stem).strip("-")[:64] or "python"
