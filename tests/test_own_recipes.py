"""The recipes of docs/own-model.md with the real libraries, each in an environment of its own that lacks Muster."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = [pytest.mark.command, pytest.mark.soak, pytest.mark.ranks, pytest.mark.timeout(900)]

ROOT = Path(__file__).parent.parent
GPT2 = {
    "model": {
        "make": "model/gpt2.py:build",
        "args": {"n_layer": 4, "n_head": 4, "n_embd": 64, "vocab_size": 256, "n_positions": 64},
        "context": 64,
    },
    "data": "python-source",
    "batch_size": 16,
}
RESNET = {"model": {"make": "model/resnet.py:build", "args": {"name": "resnet18", "num_classes": 10}}, "data": "digits"}
# PyPI's torchvision has its operators for CUDA builds of torch alone; its models need none of them.
DECLARED = """
import torch
library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    library.define(name + "(Tensor x) -> Tensor")
"""


def environment(folder: Path, *packages: str) -> Path:
    """Make an environment with this torch and some packages; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    site = next((folder / "lib").glob("python*")) / "site-packages"
    (site / "torch_of_the_tests.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    argv = [str(python), "-m", "pip", "install", "--quiet", *packages]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{packages} cannot be installed here: {done.stderr.strip()[-200:]}")
    return python


def work(folder: Path, python: Path, train: dict[str, object], *words: str) -> str:
    """Call `muster` with a job in the folder of the recipes; return what it printed."""
    job = {"workdir": str(ROOT / "jobs/examples/own"), "ranks_per_node": 2, "python": str(python), "train": train}
    (folder / "job.yaml").write_text(json.dumps(job))
    argv = [
        sys.executable,
        "-m",
        "muster",
        words[0],
        str(folder / "job.yaml"),
        "--runs",
        str(folder / "runs"),
        *words[1:],
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_gpt2_of_transformers(tmp_path):
    python = environment(tmp_path / "venv", "transformers")
    for mode in ("zero3", "1f1b"):
        assert "PASS" in work(tmp_path, python, {**GPT2, "mode": mode}, "verify", "--steps", "2")
    assert "step 6/6" in work(tmp_path, python, {**GPT2, "mode": "zero3", "steps": 6, "evaluate": False}, "run")


def test_a_resnet_of_torchvision(tmp_path):
    python = environment(tmp_path / "venv", "--no-deps", "torchvision==0.28.0")
    site = next((tmp_path / "venv" / "lib").glob("python*")) / "site-packages"
    package = site / "torchvision" / "__init__.py"
    package.write_text(DECLARED + package.read_text())
    assert "PASS" in work(tmp_path, python, {**RESNET, "mode": "zero2"}, "verify", "--steps", "2")
    assert "step 6/6" in work(tmp_path, python, {**RESNET, "mode": "zero2", "steps": 6}, "run")
