"""Slurm's words and ours. The states and reasons were seen on a real cluster (22.05), or stand in its manuals."""

import pytest

from muster.jobs.basics import exits
from muster.slurm.states import STATES, JobState, is_hopeless, is_orphan, outcome, waiting


def job(state: str = "PENDING", reason: str = "", **fields: object) -> JobState:
    return JobState("12", "vgg-1", state, reason, **fields)


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        *((state, "pending") for state in ("PENDING", "REQUEUED", "CONFIGURING", "SPECIAL_EXIT")),
        *((state, "running") for state in ("RUNNING", "COMPLETING", "SUSPENDED", "A_NEW_WORD")),
        *((state, "over") for state in ("COMPLETED", "FAILED", "NODE_FAIL", "PREEMPTED")),
    ],
)
def test_a_state_of_slurms_is_one_of_three_phases(state: str, phase: str) -> None:
    assert job(state).phase == phase


@pytest.mark.parametrize(
    ("fields", "code", "name", "message"),
    [
        (
            {"state": "TIMEOUT", "nodes": "n[1-2]"},
            124,
            "timeout",
            "Slurm job 12 on n[1-2]: it reached its time limit; raise ",
        ),
        ({"state": "DEADLINE"}, 124, "timeout", "it reached its deadline"),
        ({"state": "CANCELLED", "signal": 15}, 130, "stopped", "Slurm job 12: it was cancelled (CANCELLED)"),
        ({"state": "OUT_OF_MEMORY", "signal": 125}, 1, "failed", "it ran out of memory; raise slurm.mem"),
        (
            {"state": "NODE_FAIL", "reason": "NodeDown", "nodes": "n1"},
            69,
            "unreachable",
            "12 on n1: one of its nodes failed",
        ),
        ({"state": "BOOT_FAIL"}, 69, "unreachable", "could not be started"),
        ({"state": "PREEMPTED"}, 76, "infrastructure", "another job took its nodes"),
        ({"state": "COMPLETED"}, 1, "failed", "it ended with exit code 0, but its supervisor left no verdict"),
        (
            {"state": "FAILED", "exit_code": 7, "reason": "NonZeroExitCode"},
            7,
            "failed",
            "failed with code 7: its supervisor",
        ),
        (
            {"state": "FAILED", "exit_code": 127},
            127,
            "failed",
            "the interpreter is not on the node; correct `interpreter`",
        ),
        ({"state": "FAILED", "signal": 9, "reason": "JobLaunchFailure"}, 137, "signal", "was killed by signal 9"),
        # Slurm could not open slurm-12.out: the run folder is not on that node.
        (
            {"state": "FAILED", "signal": 53, "reason": "JobLaunchFailure", "nodes": "n3"},
            73,
            "run-folder",
            "on n3: Slurm can",
        ),
    ],
)
def test_a_job_without_a_verdict_has_the_code_of_its_end(fields: dict, code: int, name: str, message: str) -> None:
    result = outcome(job(**fields))
    assert (result.code, exits.class_of(result.code)) == (code, name)
    assert message in result.message


@pytest.mark.parametrize(
    "said",
    [
        "slurmstepd-sd0: error: StepId=17.batch exceeded memory limit (510242816 > 209715200), being killed",
        "slurmstepd-sd0: error: Exceeded job memory limit",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=17.batch. Some of your processes",
    ],
)
def test_a_killed_job_whose_output_says_memory_ran_out_of_it(said: str) -> None:
    """Without Slurm's cgroup plugin such a job is merely FAILED, by signal 9."""
    result = outcome(job("FAILED", "JobLaunchFailure", signal=9), said)
    assert result.code == 1
    assert "raise slurm.mem" in result.message


def test_every_state_that_is_over_has_an_outcome() -> None:
    for state, row in STATES.items():
        if row.phase == "over":
            result = outcome(job(state))
            assert result.code != 0
            assert "\n" not in result.message
            assert "{" not in result.message


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("None", "the scheduler has not examined it yet"),
        ("Resources", "it waits for nodes to become free (Resources)"),
        ("Priority", "jobs of higher priority come first (Priority)"),
        (
            "ReqNodeNotAvail, UnavailableNodes:n[1-2]",
            "nodes that it needs are down, drained, reserved or in use (ReqNode",
        ),
        (
            "ReqNodeNotAvail,_May_be_reserved_for_other_job",
            "or in use (ReqNodeNotAvail, May be reserved for other job)",
        ),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "are down, drained",
        ),
        ("AssocGrpCpuLimit", "currently at its limit"),
        ("AssocGrpCPUMinutesLimit", "budget"),
        ("QOSGrpNodeLimit", "currently at its limit"),
        ("JobHeldUser", "scontrol release 12 (JobHeldUser)"),
        ("SomethingNew", "it waits in the queue (SomethingNew)"),
    ],
)
def test_a_reason_to_wait_is_said_in_a_sentence(reason: str, sentence: str) -> None:
    assert sentence in waiting(job(reason=reason))
    assert not is_hopeless(job(reason=reason))


@pytest.mark.parametrize(
    "reason",
    [
        *(
            "PartitionNodeLimit",
            "PartitionTimeLimit",
            "PartitionConfig",
            "BadConstraints",
            "InvalidAccount",
            "InvalidQOS",
        ),
        *("DependencyNeverSatisfied", "QOSMaxNodePerJobLimit", "AssocMaxCpuPerJobLimit", "QOSMinCpuNotSatisfied"),
        *("launch_failed_requeued_held", "launch failed requeued held", "JobHoldMaxRequeue", "ReservationDeleted"),
    ],
)
def test_some_reasons_never_go_away_and_say_what_to_change(reason: str) -> None:
    assert is_hopeless(job(reason=reason))
    assert not is_hopeless(job("RUNNING", reason))


def test_a_state_that_waits_for_somebody_says_for_whom() -> None:
    assert waiting(job("REQUEUE_HOLD")).endswith("release it: scontrol release 12")
    assert waiting(job("CONFIGURING", "None")) == "its nodes are being prepared"


def test_a_job_that_lost_the_node_of_its_supervisor_is_an_orphan() -> None:
    """With --no-kill Slurm took sd2 out of job 29 and left it running on sd3, with nobody in it."""
    orphan = job("RUNNING", nodes="sd3", batch_host="sd2")
    assert is_orphan(orphan)
    assert outcome(orphan).code == 69
    assert "sd2, the node of its supervisor, failed" in outcome(orphan).message
    assert not is_orphan(job("RUNNING", nodes="sd[2-3]", batch_host="sd2"))
    assert not is_orphan(job("RUNNING", nodes="sd[2-3]"))
    assert not is_orphan(job("PENDING", batch_host="sd2"))
    # While it is completing, the nodes that are done are left out of the list.
    assert not is_orphan(job("COMPLETING", nodes="sd3", batch_host="sd2"))
