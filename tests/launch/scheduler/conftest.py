"""A run through Slurm's queue, with commands that say what a test wants and a supervisor that is played."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.jobs.hosts.hosts import HostSet
from muster.jobs.hosts.placement import Host, place
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.runfolder.rundir import make_run as make_folder
from muster.jobs.spec.job import CommandSettings, Job
from muster.jobs.spec.site import Site
from muster.jobs.spec.slurm import SlurmSettings
from muster.launch.plan.plan import Context
from muster.launch.plan.submission import Route, Submission
from muster.launch.scheduler import queueing, slurm_follow
from support.slurm_commands import FakeSlurm
from support.slurm_player import ID, Player


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.environment["PATH"])
    for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH"))]:
        monkeypatch.delenv(name)
    for name, value in {
        "POLL_S": 0.02,
        "ASK_S": 0.05,
        "ASK_SOON_S": 0.05,
        "VERDICT_S": 0.2,
        "HOPELESS_S": 0.3,
        "LEASE_S": 0.5,
    }.items():
        monkeypatch.setattr(slurm_follow, name, value)
    return fake


@pytest.fixture
def submission(tmp_path: Path) -> Submission:
    """A command of two nodes with two ranks each; its folder is made."""
    settings = CommandSettings(argv=["true"])
    job = Job(name="demo", kind="command", nodes=2, ranks_per_node=2, threads_per_rank=3, settings=settings)
    site = Site(slurm=SlurmSettings(partition="main"))
    run = RunDir(tmp_path / "runs" / ID)
    make_folder(run)
    placement = place(job, [Host(f"slurm-{node}", "") for node in range(2)])
    context = Context(job, site, placement, run, "/srv/job", "/opt/python", None, code="/opt/muster")
    return Submission(Route("slurm", HostSet((), "slurm", environment={"SLURM_CONF": str(run.path)})), context)


@pytest.fixture
def run(submission: Submission, slurm: FakeSlurm) -> RunDir:
    """The run of `submission`, which waits in the queue as job 12."""
    queueing.submit([submission])
    return submission.context.run


@pytest.fixture
def player(submission: Submission, slurm: FakeSlurm) -> Iterator[Player]:
    player = Player(submission.context.run, slurm)
    yield player
    for thread in player.threads:
        thread.join()
