"""What a batch script's output tells the supervisor: why agents went, and who ran out of memory."""

from typing import Any

from muster.launch.plan.submission import Submission
from muster.launch.records.verdict import RankEnd, Stop
from muster.launch.scheduler.slurm_output import BatchOutput


def ending(**fields: Any) -> RankEnd:
    row = {"rank": 0, "node": 1, "host": "n1", "code": None, "signal": None, "ended": 1.0, "cause": "own"}
    return RankEnd(**{**row, **fields})


def test_agents_that_went_all_at_once_went_because_slurm_says_so(submission: Submission) -> None:
    run = submission.context.run
    path = run.path / "slurm-12.out"
    path.write_text("error: *** JOB 12 ON n1 CANCELLED AT 2026-11-21T10:27:30 DUE TO JOB REQUEUE ***\n")
    output = BatchOutput(run, "12")
    gone = ending(rank=None, code=69, message="its agent has gone")
    assert output.cause(gone) is None  # what stands there is of the try before
    for failure in (gone, ending(signal="SIGTERM"), ending(signal="SIGKILL")):
        with path.open("a") as file:
            file.write("error: *** JOB 12 ON n1 CANCELLED AT 2026-11-21T10:28:38 ***\nstopping the ranks\n")
        assert output.cause(failure) == Stop(130, "stopped by scancel", final=True)
    assert output.cause(ending(code=3)) is None  # a rank that failed by itself before
    assert output.cause(None) is None


def test_who_ran_out_of_memory_is_named_and_only_in_the_attempt_that_did(submission: Submission) -> None:
    run = submission.context.run
    output = BatchOutput(run, "12")
    (run.path / "slurm-12.out").write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.\n")
    text = "killed by Slurm because it ran out of memory; raise slurm.mem, or put fewer ranks on a node"
    assert output.cause(ending(signal="SIGKILL")) == Stop(1, f"rank 0 on node 1 (n1): {text}")
    assert output.cause(ending(signal="SIGKILL")) is None  # the next attempt: somebody else's kill -9
    with (run.path / "slurm-12.out").open("a") as file:
        file.write("srun: error: n2: task 1: Out Of Memory\n")
    assert output.cause(ending(rank=None)) == Stop(1, f"n2: {text}")  # the one that was seen first went with it
    assert output.complaint() is not None


def test_without_an_output_nothing_is_known(submission: Submission) -> None:
    assert BatchOutput(submission.context.run, "12").cause(ending(signal="SIGTERM")) is None
