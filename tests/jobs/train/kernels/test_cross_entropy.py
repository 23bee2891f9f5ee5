"""The cross-entropy as one kernel: values and gradients, in the interpreter and on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).parent / "cross_entropy_checks.py"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_loss_and_gradients_are_torchs(device: str) -> None:
    environ = {**os.environ, **({"TRITON_INTERPRET": "1"} if device == "cpu" else {})}
    done = subprocess.run(
        [sys.executable, str(CHECKS), device], env=environ, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "76 cases\n"), done.stderr
