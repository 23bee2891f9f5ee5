"""What Slurm prints when it ends a job, recorded from a real one (22.05) or from the texts in its slurmstepd."""

import pytest

from muster.slurm.complaints import complaint

AT = "CANCELLED AT 2026-11-21T10:25:38"


@pytest.mark.parametrize(
    ("lines", "code", "message"),
    [
        ([f"slurmstepd-node0: error: *** JOB 9 ON node0 {AT} ***"], 130, "stopped by scancel"),
        ([f"slurmstepd: error: *** STEP 9.0 ON node0 {AT} ***"], 130, "stopped by scancel"),
        ([f"slurmstepd-node0: error: *** JOB 13 ON node0 {AT} DUE TO JOB REQUEUE ***"], 130, "queues the job again"),
        ([f"slurmstepd: error: *** JOB 9 ON n1 {AT} DUE TO TIME LIMIT ***"], 124, "raise slurm.time"),
        ([f"slurmstepd: error: *** JOB 9 ON n1 {AT} DUE TO PREEMPTION ***"], 76, "to another job"),
        (
            [f"slurmstepd: error: *** STEP 9.0 ON n1 {AT} DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***"],
            69,
            "one of the job's nodes",
        ),
        (["srun: error: Node failure on node1"], 69, "one of the job's nodes failed"),
        (
            ["slurmstepd-sd0: error: StepId=18.0 exceeded memory limit (454541312 > 209715200), being killed"],
            1,
            "ran out of memory (433M used, 200M allowed); raise slurm.mem",
        ),
        (["slurmstepd: error: Detected 1 oom_kill event in StepId=5.0."], 1, "slurm.mem"),
        (["srun: error: n2: task 1: Out Of Memory"], 1, "slurm.mem"),
        # The memory is the cause, the cancelled job its consequence.
        (["error: Exceeded job memory limit", f"*** JOB 17 ON sd0 {AT} ***", "rank 0: done"], 1, "slurm.mem"),
    ],
)
def test_slurms_last_words_tell_why(lines: list[str], code: int, message: str) -> None:
    found = complaint(lines)
    assert found.code == code
    assert message in found.message


def test_output_of_a_program_is_no_complaint() -> None:
    assert complaint([]) is None
    assert complaint(["srun: error: node1: task 1: Killed", "Traceback (most recent call last):", "CANCELLED"]) is None


@pytest.mark.parametrize(
    ("lines", "host"),
    [
        # Recorded: the node of the batch script complains of the whole job, the other one of its step.
        (
            [
                "slurmstepd-node0: error: Exceeded job memory limit",
                "slurmstepd-node1: error: StepId=17.0 exceeded memory limit (807878656 > 419430400), being killed",
            ],
            "node1",
        ),
        (
            ["slurmstepd: error: Detected 1 oom_kill event in StepId=5.0.", "srun: error: n2: task 1: Out Of Memory"],
            "n2",
        ),
        (["slurmstepd: error: Detected 1 oom_kill event in StepId=5.0."], ""),
        ([f"slurmstepd: error: *** JOB 9 ON n1 {AT} ***"], ""),
    ],
)
def test_the_node_that_ran_out_of_memory_is_named(lines: list[str], host: str) -> None:
    found = complaint(lines)
    assert found.host == host
