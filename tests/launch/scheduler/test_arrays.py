"""Several runs are one array in Slurm's queue; they are followed and stopped together."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from muster.jobs.basics.errors import RefusedError
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.runfolder.rundir import make_run as make_folder
from muster.launch.plan.submission import Submission
from muster.launch.records.slurm_job import SlurmJob, output_path
from muster.launch.scheduler import slurm_follow
from muster.launch.scheduler.held_signals import listening
from muster.launch.scheduler.queueing import submit
from muster.launch.scheduler.slurm_follow import RunFollower, until_ended
from muster.launch.supervision.console import Console
from support.slurm_commands import FakeSlurm
from support.slurm_player import Player, ended

pytestmark = pytest.mark.slow

NAME = "sweep-demo-0"


@pytest.fixture
def pair(submission: Submission) -> list[Submission]:
    """Two runs of one shape."""
    run = RunDir(submission.context.run.path.with_name("demo-20250101T000001.000Z-abc123"))
    make_folder(run)
    return [submission, replace(submission, context=replace(submission.context, run=run))]


@pytest.fixture
def runs(pair: list[Submission], slurm: FakeSlurm, tmp_path: Path) -> list[RunDir]:
    """The runs of `pair`, which wait as the elements 12_0 and 12_1."""
    folder = tmp_path / "runs" / "sweep-demo"
    folder.mkdir()
    assert submit(pair, name=NAME, folder=folder, limit=1).job_id == "12"
    return [each.context.run for each in pair]


def followers(runs: list[RunDir], trouble: Console | None = None) -> list[RunFollower]:
    return [RunFollower(run, Console(quiet=True), trouble=trouble) for run in runs]


def test_runs_of_one_shape_are_one_array(runs: list[RunDir], slurm: FakeSlurm, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "sweep-demo"
    assert (folder / "array-0.runs").read_text().split() == [str(run.path) for run in runs]
    assert "#SBATCH --array=0-1%1\n" in (folder / "array-0.sh").read_text()
    assert [call[-1] for call in slurm.calls("sbatch")] == [str(folder / "array-0.sh")]
    for number, run in enumerate(runs):
        job = SlurmJob.read(run)
        assert (job.job_id, job.name) == (f"12_{number}", NAME)
        assert output_path(run, job).readlink() == folder / f"slurm-12_{number}.out"


def test_a_refused_array_ends_all_of_its_runs(pair: list[Submission], slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.says(refuses="sbatch: error: invalid partition specified: main")
    with pytest.raises(RefusedError, match=r"slurm.partition: sbatch says: invalid"):
        submit(pair, name="runs-0", folder=tmp_path / "runs")
    assert [ended(each.context.run)["code"] for each in pair] == [78, 78]


def test_waiting_elements_are_asked_about_together_and_a_forgotten_one_was_cancelled(
    runs: list[RunDir], slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm forgets an element that is cancelled as it waits."""
    slurm.job("12_0", state="FAILED", code="3:0", nodes="n1", host="n1")
    slurm.job("12_1", forgotten=True)
    found = {each.run: each.code for each in until_ended(followers(runs), [])}
    assert found == {runs[0]: 3, runs[1]: 130}
    assert slurm.calls("squeue")[0][-1] == "--jobs=12_0,12_1"
    assert ended(runs[1])["message"] == "stopped by scancel while Slurm job 12_1 waited"
    assert capsys.readouterr().err == ""


def test_ctrl_c_cancels_each_element_and_says_so_once(
    runs: list[RunDir], slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    console, player = Console(), Player(runs[0], slurm)

    def scene() -> None:
        player.wait(lambda: slurm.calls("squeue"))
        os.kill(os.getpid(), signal.SIGINT)

    with listening([]) as asked:
        player.play(scene)
        codes = [each.code for each in until_ended(followers(runs, console), asked, told=console)]
    player.threads[0].join()
    assert (codes, asked) == ([130, 130], ["Ctrl-C"])
    assert slurm.calls("scancel") == [["scancel", "12_0"], ["scancel", "12_1"]]
    assert capsys.readouterr().err == "stopping 2 points: Ctrl-C\n"


def test_a_controller_that_is_away_is_said_once_for_all(
    runs: list[RunDir], slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.says(down="slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    player = Player(runs[0], slurm)

    def scene() -> None:
        player.wait(lambda: len(slurm.calls("squeue")) > 2)
        slurm.says(down="")
        for number in range(2):
            slurm.job(f"12_{number}", state="TIMEOUT")

    player.play(scene)
    assert [each.code for each in until_ended(followers(runs, Console()), [])] == [124, 124]
    player.threads[0].join()
    assert capsys.readouterr().err.count("still trying") == 1


def test_stop_ends_all_elements(runs: list[RunDir], slurm: FakeSlurm) -> None:
    slurm_follow.cancel(runs, grace_s=None, now=False)
    assert [ended(run)["message"] for run in runs] == [
        f"stopped by muster stop while Slurm job 12_{number} waited" for number in range(2)
    ]
