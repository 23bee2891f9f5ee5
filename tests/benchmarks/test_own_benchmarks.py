"""The benchmarks of a user's own programs: they run, and count what they say."""

import json
import subprocess
import sys
from pathlib import Path

import own_lines
import pytest

pytestmark = pytest.mark.command

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_lines_of_code_are_counted_and_nothing_else():
    plain = '"""Plain."""\nimport torch\nfor step in range(9):\n    train()\n'
    changed = '"""Changed."""\nimport torch\n\n# why\nimport muster\nfor step in run.steps(9):\n    train()\n'
    assert own_lines.added(plain, changed) == ["import muster", "for step in run.steps(9):"]


@pytest.mark.soak  # nothing else depends on this script, and whoever runs it sees if it fails
def test_a_benchmark_under_muster_run_ends_with_its_record(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "save_stall.py"), "session", "--ranks", "2", "--quick"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert out.returncode in (0, 1), out.stderr  # 1: the goal is out of reach, as it may be in a test
    record = next(json.loads(line) for line in out.stdout.splitlines() if line.startswith("{"))
    (row,) = record["rows"]
    assert len(row["ours"]) == len(row["theirs"]) == 1
