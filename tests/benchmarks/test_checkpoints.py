"""Processes that save are killed at random moments: the short form of the benchmark of 2,000."""

from pathlib import Path

import checkpoints
import pytest

pytestmark = pytest.mark.slow
SMALL = 1 << 12


@pytest.fixture(autouse=True)
def soon(monkeypatch) -> None:
    """Kill sooner, for small tensors are saved sooner."""
    monkeypatch.setattr(checkpoints, "LONGEST_S", 0.05)


def test_there_is_always_a_whole_checkpoint_that_is_not_older_than_the_last_commit(tmp_path: Path) -> None:
    counts = checkpoints.killed(tmp_path, 25, 1, SMALL)
    assert (counts["trials"], counts["loadable"]) == (25, 25)
    assert (counts["torn"], counts["backwards"], counts["not loadable"], counts["failed writers"]) == (0, 0, 0, 0)


def test_a_mixed_or_an_older_checkpoint_would_be_counted(tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "is_of_one_step", lambda chosen, elements: False)
        assert checkpoints.killed(tmp_path, 1, 2, SMALL)["torn"] == 1
    real = checkpoints.reports
    monkeypatch.setattr(checkpoints, "reports", lambda descriptor: [*real(descriptor), 10**6])
    assert checkpoints.killed(tmp_path, 1, 3, SMALL)["backwards"] == 1
