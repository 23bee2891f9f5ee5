"""RMSNorm in PyTorch and in Triton, and LayerNorm: values, and what the fused ones do where they cannot run."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from muster.jobs.spec.load import EXAMPLES
from muster.jobs.train.kernels import layer_norm
from muster.jobs.train.kernels import rms_norm as ways
from muster.jobs.train.kernels.layer_norm import FusedLayerNorm
from muster.jobs.train.kernels.rms_norm import FusedRmsNorm, rms_norm
from support.programs import Programs

CHECKS = Path(__file__).parent / "norms_checks.py"


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 3, 10), (0, 4)])
def test_the_plain_one_is_torchs(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape, dtype=torch.float64), torch.randn(shape[-1], dtype=torch.float64)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, shape[-1:], weight, 1e-5), rtol=1e-12, atol=1e-12
    )


def test_the_kernels_are_right_in_the_interpreter() -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(CHECKS), "cpu"], env=environ, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "43 cases\n"), done.stderr


def test_the_example_that_teaches_triton_is_right() -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    argv = [sys.executable, str(EXAMPLES / "kernels/weighted_sum.py")]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_program_that_times_norms_prints_a_row_for_each_pass_of_each(programs: Programs) -> None:
    program = [str(EXAMPLES / "kernels/norms.py"), "--norms", "layer,rms,rms_fused"]
    environ = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = ("--widths", "16,24", "--rows", "8", "--dtypes", "fp32", "--samples", "1")
    argv = [sys.executable, *program, *words]  # Triton reads the environment when it is imported
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    head, *rows = (line.split() for line in done.stdout.splitlines())
    assert head == ["norm", "width", "dtype", "pass", "ms", "GB/s", "of", "the", "copy"]
    norms = [(name, each) for name in ("layer", "rms", "rms_fused") for each in ("forward", "both")]
    keys = [[name, width, "fp32", each] for width in ("16", "24") for name, each in [("copy", "forward"), *norms]]
    assert [row[:4] for row in rows] == keys
    assert [row[6] for row in rows if row[0] == "copy"] == ["1.000", "1.000"]
    for _, width, _, each, milliseconds, gb_s, _ in rows:
        moved = (2 if each == "forward" else 5) * 8 * int(width) * 4
        assert float(gb_s) == pytest.approx(1e-6 * moved / float(milliseconds), rel=0.2)  # of the printed digits
    plain = {key: value for key, value in environ.items() if key != "TRITON_INTERPRET"}
    done = programs.run(*program, *words, env=plain)
    assert "rms_fused is left out: Triton's kernels need a GPU, x is on cpu" in done.stdout


@pytest.mark.gpu
def test_the_program_that_times_norms_replays_graphs_on_a_gpu() -> None:
    program = [sys.executable, str(EXAMPLES / "kernels/norms.py"), "--widths", "1000", "--rows", "500"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout.count("\n")) == (0, 1 + 2 * 9), done.stdout + done.stderr


@pytest.mark.gpu
def test_the_kernels_are_right_on_a_gpu() -> None:
    done = subprocess.run([sys.executable, str(CHECKS), "cuda"], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "43 cases\n"), done.stderr


def test_without_a_gpu_the_fused_one_is_torchs_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "_warned", set())
    module, x = FusedRmsNorm(8, eps=1e-5), torch.randn(3, 8)
    with pytest.warns(UserWarning, match="rms_fused runs as torch's RMSNorm: Triton's kernels need a GPU, x is on cpu"):
        first = module(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(module(x), first)
    assert torch.equal(first, torch.nn.functional.rms_norm(x, (8,), module.weight, 1e-5))


def test_what_the_kernels_cannot_do_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert ways.why_not_fused(torch.ones(2, 3)) == ""
    assert ways.why_not_fused(torch.ones(2, 3, dtype=torch.float64)) == (
        "the kernels compute in float32, x is torch.float64"
    )
    assert "rows have 65537 elements" in ways.why_not_fused(torch.ones(1, 65537))
    monkeypatch.setattr(ways, "why_no_triton", lambda device: f"{device}: triton is not installed")
    assert ways.why_not_fused(torch.ones(2, 3)) == "cpu: triton is not installed"


def test_triton_on_a_gpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert ways.why_no_triton.__wrapped__("cuda") == (
        "Triton needs a compiler, but none of no-such-compiler is installed; install one or name it in CC"
    )
    assert ways.why_no_triton.__wrapped__("cpu") == ""


def test_without_a_gpu_layer_norm_is_torchs_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_norm, "MIN_ELEMENTS", 0)
    x = torch.randn(3, 8)
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        y = FusedLayerNorm(8, narrow=True)(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, torch.nn.functional.layer_norm(x, (8,), torch.ones(8), torch.zeros(8)))
