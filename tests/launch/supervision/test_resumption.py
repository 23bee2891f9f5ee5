"""Which jobs make checkpoints, and which go on after a time limit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.jobs.spec.failover import CheckpointSettings, RestartSettings
from muster.launch.supervision.resumption import continues, saves


def context(kind: str, *, checkpoint: bool = False, restart: bool = False) -> Any:
    job = SimpleNamespace(
        kind=kind,
        checkpoint=CheckpointSettings() if checkpoint else None,
        restart=RestartSettings() if restart else None,
    )
    return SimpleNamespace(job=job, entry=None if kind == "command" else "module:function", run=Path("run"))


@pytest.mark.parametrize(
    ("job", "session", "expected"),
    [
        (context("train"), False, (False, False)),
        (context("train", restart=True), False, (False, False)),
        (context("train", checkpoint=True), False, (True, True)),
        (context("bench"), False, (False, False)),
        (context("command"), False, (True, False)),
        (context("command", checkpoint=True), False, (True, False)),  # it may open no session
        (context("command", restart=True), False, (True, True)),
        (context("command"), True, (True, True)),
    ],
)
def test_a_program_goes_on_if_it_has_said_that_it_can(job: Any, session: bool, expected: tuple[bool, bool]) -> None:
    assert (saves(job), continues(job, session=session)) == expected
