"""benchmarks/made_steps.py: both sides are timed, whichever is built first."""

from pathlib import Path

import made_steps
import pytest
from ranks import on_ranks

pytestmark = pytest.mark.command


@pytest.mark.soak  # only people run this script, and they see if it fails
@pytest.mark.ranks
def test_both_sides_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(made_steps.__file__).parent)
    found = on_ranks(made_steps.measure, 2, mode="1f1b", repeats=1, first="own")
    assert sorted(found) == ["made", "own"]
    assert all(len(blocks) == 1 and min(blocks[0]) > 0.0 for blocks in found.values())
