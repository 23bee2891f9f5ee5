"""Runs with checkpoints in them."""

from pathlib import Path

import pytest

from support.checkpoints import Saved


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """A run with one attempt and no checkpoint."""
    return Saved(tmp_path / "run")
