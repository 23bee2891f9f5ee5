"""A session in a Python that has no packages at all: it is saved, stopped by a signal, and continued."""

import os
import signal
import subprocess
import venv
from pathlib import Path

import pytest

from muster.jobs.basics.boot import CODE_ROOT, importable
from support.live import wait_until

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
import time
import muster

run = muster.session()
state = run.state(total=0, seen=[1, 2])
for step in run.steps(30, state):
    state.total += step
    run.log(total=state.total)
    time.sleep(float(sys.argv[1]))
known = set(sys.stdlib_module_names) | {"muster", "__main__", "__mp_main__"}
print("others", sorted({name.partition(".")[0] for name in sys.modules} - known), "total", state.total)
"""


def test_plain_values_survive_a_signal_without_any_package(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    (tmp_path / "program.py").write_text(PROGRAM)
    environ = {**os.environ, "PYTHONPATH": importable(str(CODE_ROOT)), "MUSTER_RUNS": str(tmp_path / "runs")}
    argv = [str(tmp_path / "bare" / "bin" / "python"), str(tmp_path / "program.py")]

    first = subprocess.Popen([*argv, "0.5"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: list(tmp_path.glob("runs/*/metrics.jsonl")), "the first step")
    (folder,) = (tmp_path / "runs").iterdir()
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=60)
    assert first.returncode == 75, err
    assert "stopped after step" in out
    assert f"muster: to continue: MUSTER_RESUME={folder}" in err

    environ["MUSTER_RESUME"] = str(folder)
    again = subprocess.run([*argv, "0"], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 0, again.stderr
    assert "continues from step-" in again.stdout
    assert "saved step-00000030.a001" in again.stdout
    assert f"others [] total {sum(range(30))}" in again.stdout
