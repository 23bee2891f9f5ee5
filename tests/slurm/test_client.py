"""What we ask Slurm's commands, and how their answers are read. The lines are recorded from a real cluster (22.05)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.errors import RefusedError, UnreachableError
from muster.slurm import client as client_module
from muster.slurm.client import Client, SubmissionRefusedError, from_sacct, from_scontrol, from_squeue, unix_s
from muster.slurm.states import JobState
from support.slurm_commands import FakeSlurm

SCONTROL = (
    "JobId=29 JobName=nofail UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901737 Nice=0 Account=(null) "
    "QOS=(null) JobState=RUNNING Reason=None Dependency=(null) Requeue=0 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0 "
    "RunTime=00:02:37 TimeLimit=UNLIMITED TimeMin=N/A SubmitTime=2026-11-21T09:58:27 EndTime=Unknown Deadline=N/A "
    "Partition=main AllocNode:Sid=localhost:14168 ReqNodeList=sd[2-3] ExcNodeList=(null) NodeList=sd3 BatchHost=sd2 "
    "NumNodes=1 Features=(null) Command=/x/nofail.sh WorkDir=/x StdOut=/x/slurm-29.out Power= \n"
)


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "bin")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "sbatch.sh"
    path.write_text("#!/bin/sh\n#SBATCH --job-name=vgg-1\nexec true\n")
    return path


@pytest.mark.parametrize(
    ("read", "line", "state"),
    [
        (
            from_squeue,
            "4|PENDING|s.sh||N/A|n/a|PartitionNodeLimit",
            JobState("4", "s.sh", "PENDING", "PartitionNodeLimit"),
        ),
        (
            from_squeue,
            "25_2|RUNNING|arr|sd[0-1]|N/A|sd0|None",
            JobState("25_2", "arr", "RUNNING", "None", "sd[0-1]", batch_host="sd0"),
        ),
        (
            from_squeue,
            "7|PENDING|s.sh||N/A|n/a|ReqNodeNotAvail, UnavailableNodes:sd[1-2]",
            JobState("7", "s.sh", "PENDING", "ReqNodeNotAvail, UnavailableNodes:sd[1-2]"),
        ),
        (from_squeue, "", None),
        (from_squeue, "slurm_load_jobs error: something", None),
        (
            from_sacct,
            "12|CANCELLED by 1000|vgg|None assigned|Unknown|0:0|None",
            JobState("12", "vgg", "CANCELLED", "None", "", end_time=None),
        ),
        (
            from_sacct,
            "12_3|OUT_OF_MEMORY|vgg|n1|x|0:125|None",
            JobState("12_3", "vgg", "OUT_OF_MEMORY", "None", "n1", signal=125),
        ),
        (from_sacct, "Slurm accounting storage is disabled", None),
    ],
)
def test_a_line_of_squeue_or_of_sacct_is_read(
    read: Callable[[str], JobState | None], line: str, state: JobState | None
) -> None:
    assert read(line) == state


RUNNING = JobState("29", "nofail", "RUNNING", "", "sd3", restarts=2, batch_host="sd2")


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, {}),
        (
            {"RUNNING": "FAILED", "ExitCode=0:0": "ExitCode=7:9", "Reason=None": "Reason=X"},
            {"state": "FAILED", "reason": "X", "exit_code": 7, "signal": 9},
        ),
        ({"RUNNING": "RUNNING PreemptTime=2025-01-01T00:00:00"}, {"preempted": unix_s("2025-01-01T00:00:00")}),
        ({"Power=": "Comment=x JobState=COMPLETED ExitCode=1:0"}, {}),  # a comment cannot pose as a state
    ],
)
def test_what_scontrol_says_of_a_job_is_read(changes: dict[str, str], wanted: dict[str, Any]) -> None:
    said = SCONTROL
    for old, new in changes.items():
        said = said.replace(old, new)
    assert from_scontrol(said, "29") == replace(RUNNING, **wanted)
    assert from_scontrol("", "29") is None


def test_times_are_of_this_machines_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    assert unix_s("2026-11-21T09:45:49") == 1795254349.0
    assert unix_s("Unknown") is None
    assert unix_s("N/A") is None
    monkeypatch.undo()
    time.tzset()


def test_a_script_is_submitted_and_the_number_read(slurm: FakeSlurm, script: Path) -> None:
    client = Client(slurm.environment)
    environment = {**slurm.environment, "SECRET": "a b\nc"}
    assert client.submit(script, name="vgg-1", environment=environment).job_id == "12"
    assert slurm.calls() == [["sbatch", "--parsable", str(script)]]
    assert slurm.environments("sbatch")[0]["SECRET"] == "a b\nc"


def test_a_job_of_another_cluster_is_asked_about_there(slurm: FakeSlurm, script: Path) -> None:
    with slurm.world() as world:
        world["suffix"] = ";far"
        world["note"] = "sbatch: warning: something"
    submitted = Client(slurm.environment).submit(script, name="vgg-1")
    assert (submitted.job_id, submitted.cluster, submitted.notes) == ("12", "far", "sbatch: warning: something")
    Client(slurm.environment, "far").query(["12"])
    assert "--clusters=far" in slurm.calls("squeue")[0]


def test_a_refusal_carries_what_sbatch_said(slurm: FakeSlurm, script: Path) -> None:
    slurm.says(refuses="sbatch: error: Batch job submission failed: Invalid partition name specified")
    with pytest.raises(SubmissionRefusedError, match="Invalid partition name specified"):
        Client(slurm.environment).submit(script, name="vgg-1")


def test_a_job_whose_number_got_lost_on_the_way_is_found_by_its_name(slurm: FakeSlurm, script: Path) -> None:
    """sbatch may give up waiting for a busy controller that has taken the job: submitting again would make two."""
    slurm.says(loses_answer="sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
    assert Client(slurm.environment).submit(script, name="vgg-1").job_id == "12"


def test_an_sbatch_that_hangs_is_left_after_a_while(
    slurm: FakeSlurm, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slurm.folder / "sbatch").write_text("#!/bin/sh\nexec sleep 50\n")
    monkeypatch.setattr(client_module, "SUBMIT_S", 0.3)
    with pytest.raises(UnreachableError, match=r"sbatch has not answered within 0.3 s, and the job does not exist"):
        Client(slurm.environment).submit(script, name="vgg-1")
    slurm.job("40", name="vgg-1", state="PENDING")
    assert Client(slurm.environment).submit(script, name="vgg-1").job_id == "40"


def test_many_jobs_are_one_call_of_squeue_and_only_those_that_are_over_need_more(slurm: FakeSlurm) -> None:
    slurm.job("12", name="a", state="PENDING", reason="Resources")
    slurm.job("13", name="b", state="RUNNING", nodes="n[1-2]", host="n1")
    slurm.job("14", name="c", state="FAILED", code="7:0", nodes="n1")
    states = Client(slurm.environment).query(["12", "13", "14", "12"])
    assert {job_id: (state.state, state.exit_code) for job_id, state in states.items()} == {
        "12": ("PENDING", 0),
        "13": ("RUNNING", 0),
        "14": ("FAILED", 7),
    }
    assert [call[0] for call in slurm.calls()] == ["squeue", "scontrol"]
    assert Client(slurm.environment).query([]) == {}


def test_a_job_that_the_controller_has_forgotten_is_looked_up_in_the_accounting(slurm: FakeSlurm) -> None:
    slurm.job("12", name="a", state="COMPLETED", forgotten=True, accounted="TIMEOUT")
    assert Client(slurm.environment).query(["12"]) == {}
    slurm.says(accounting=True)
    assert Client(slurm.environment).query(["12"])["12"].state == "TIMEOUT"
    (slurm.folder / "sacct").unlink()
    assert Client({"PATH": str(slurm.folder)}).query(["12"]) == {}


def test_cancelling_what_is_over_or_gone_is_no_error(slurm: FakeSlurm) -> None:
    client = Client(slurm.environment)
    slurm.job("12", name="a", state="PENDING")
    client.cancel("12")
    client.cancel("12")
    client.cancel("99")
    for said in ("Invalid job id specified", "Job/step already completing or completed"):
        slurm.says(scancel_says=f"scancel: error: Kill job error on job id 12: {said}")
        client.cancel("12")


def test_somebody_elses_job_is_not_cancelled(slurm: FakeSlurm) -> None:
    slurm.says(scancel_says="scancel: error: Kill job error on job id 12: Access/permission denied")
    with pytest.raises(RefusedError, match=r"slurm job 12: scancel says: .*denied; only its owner can cancel it"):
        Client(slurm.environment).cancel("12")


def test_a_controller_that_is_down_is_said_so(slurm: FakeSlurm) -> None:
    slurm.says(down="slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    client = Client(slurm.environment)
    with pytest.raises(UnreachableError, match=r"slurm: squeue says: .*Unable to contact slurm controller"):
        client.query(["12"])
    with pytest.raises(UnreachableError, match="scancel says"):
        client.cancel("12")
    assert client.partitions() == ""


def test_without_slurm_or_its_configuration_it_is_said_what_to_do(slurm: FakeSlurm, tmp_path: Path) -> None:
    """Slurm's commands themselves try for a minute to read a configuration that is not there."""
    for environ, said in (
        ({"PATH": str(tmp_path)}, "squeue is not on PATH here; run this on the cluster's login node, or choose"),
        ({**slurm.environment, "SLURM_CONF": "/nosuch"}, "SLURM_CONF=/nosuch: no such file"),
    ):
        with pytest.raises(RefusedError, match=said):
            Client(environ).query(["12"])


def test_a_users_own_format_of_squeue_does_not_disturb(slurm: FakeSlurm) -> None:
    slurm.job("12", name="a", state="PENDING")
    own = {"SQUEUE_USERS": "somebody", "SQUEUE_FORMAT": "%u", "SLURM_TIME_FORMAT": "relative", "SACCT_FORMAT": "x"}
    Client({**slurm.environment, **own}).query(["12"])
    assert not own.keys() & slurm.environments("squeue")[0].keys()
