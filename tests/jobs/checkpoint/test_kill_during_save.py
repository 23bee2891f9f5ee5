"""Processes that save are killed at random moments: the short form of the benchmark of 2,000."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    """benchmarks/kill_during_save.py, with small tensors."""
    path = Path(__file__).parents[3] / "benchmarks" / "kill_during_save.py"
    spec = importlib.util.spec_from_file_location("kill_during_save", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ELEMENTS, module.LONGEST_S = 1 << 12, 0.05
    return module


def test_there_is_always_a_whole_checkpoint_that_is_not_older_than_the_last_commit(
    benchmark: ModuleType, tmp_path: Path
) -> None:
    counts = benchmark.ours(tmp_path, 25, 1)
    assert (counts["trials"], counts["loadable"]) == (25, 25)
    assert (counts["torn"], counts["backwards"], counts["not loadable"], counts["failed writers"]) == (0, 0, 0, 0)


def test_a_mixed_or_an_older_checkpoint_would_be_counted(benchmark: ModuleType, tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(benchmark, "is_of_one_step", lambda chosen: False)
        assert benchmark.ours(tmp_path, 1, 2)["torn"] == 1
    real = benchmark.reports
    monkeypatch.setattr(benchmark, "reports", lambda descriptor: [*real(descriptor), 10**6])
    assert benchmark.ours(tmp_path, 1, 3)["backwards"] == 1
