"""What Slurm's notice to a job is, from the state of the job: a drawn table."""

from typing import Any

import pytest

from muster.slurm.notice import Notice, notice_of
from muster.slurm.states import JobState

NOW = 1000.0
PREEMPTED = Notice("preempted", 1020.0)


@pytest.mark.parametrize(
    ("state", "limit", "notice"),
    [
        ({"state": "RUNNING", "preempted": 999.0, "end_time": 1020.0}, False, PREEMPTED),
        ({"state": "RUNNING", "preempted": 999.0, "end_time": 1020.0}, True, PREEMPTED),
        ({"state": "SIGNALING", "preempted": 999.0, "end_time": 1020.0}, False, PREEMPTED),
        ({"state": "RUNNING", "end_time": 1089.0}, False, Notice("time limit", 1089.0)),
        ({"state": "RUNNING", "end_time": 1091.0}, False, None),
        ({"state": "RUNNING", "end_time": 1091.0}, True, Notice("time limit", 1030.0)),
        ({"state": "RUNNING"}, False, None),
        ({"state": "COMPLETING", "end_time": 999.0}, False, None),
        ({"state": "CANCELLED", "end_time": 1000.0}, False, None),
        (None, False, None),
        (None, True, Notice("time limit", 1030.0)),
    ],
)
def test_a_notice_is_of_a_running_job_that_is_preempted_or_near_its_limit(
    state: dict[str, Any] | None, limit: bool, notice: Notice | None
) -> None:
    job = None if state is None else JobState("1", "demo", **state)
    assert notice_of(job, NOW, 30, limit=limit) == notice
