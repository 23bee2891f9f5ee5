"""The benchmarks' own modules, and one bench for all rows: what an unhurt run ends with is made once."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from faults.bench import Bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A bench without a box."""
    return Bench(tmp_path_factory.mktemp("chaos"))
