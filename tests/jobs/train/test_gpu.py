"""Training on CUDA devices, through `muster run`. `pytest -m gpu` on a machine that has at least two."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.files import read_lines
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.modes import MODES, TENSOR
from support.live import LiveRun
from support.resuming import ADAMW, VGG, attempt_apart

ROOT = Path(__file__).parents[3]
SHARED = [name for name in MODES if name not in ("single", "terapipe", TENSOR)]
pytestmark = [pytest.mark.command, pytest.mark.gpu, pytest.mark.ranks]

JOB = """
nodes: {nodes}
ranks_per_node: {ranks}
train:
  model: {model}
  data: {data}
  mode: {mode}
  batch_size: 64
  steps: 8
  log_every: 4
  deterministic: true
  device: {device}
  optimizer: {{name: sgd, lr: 0.01, momentum: 0.9}}
"""


def job(
    *,
    nodes: int = 1,
    ranks: int = 1,
    mode: str = "ddp",
    device: str = "cuda",
    model: str = "vgg11",
    data: str = "digits",
) -> str:
    return JOB.format(nodes=nodes, ranks=ranks, mode=mode, device=device, model=model, data=data)


def train(folder: Path, text: str) -> tuple[RunDir, list[dict[str, Any]]]:
    folder.mkdir()
    live = LiveRun(folder, text)
    assert live.end() == 0, live.err
    return live.run, [row for row in read_lines(live.run.metrics) if "evaluation" not in row]


def test_a_cuda_rank_forked_from_the_warm_process_trains_as_a_cpu_rank_does(tmp_path: Path) -> None:
    eager = job(mode="single").replace("steps: 8", "steps: 8\n  cuda_graph: false")  # a replay has no phases
    run, on_gpu = train(tmp_path / "gpu", eager)
    _, on_cpu = train(tmp_path / "cpu", job(mode="single", device="cpu"))
    assert "on cuda" in run.attempt(0).out(0).read_text()
    assert [row["loss"] for row in on_gpu] == pytest.approx([row["loss"] for row in on_cpu], rel=2e-2)
    assert all(row["forward_s"] > 0 and row["backward_s"] > 0 and row["optimizer_s"] > 0 for row in on_gpu)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("mode", SHARED)
def test_two_gpus_over_nccl_train_as_one_does(tmp_path: Path, mode: str) -> None:
    run, two = train(tmp_path / "two", job(ranks=2, mode=mode))
    _, again = train(tmp_path / "again", job(nodes=2, mode=mode))
    assert [row["loss"] for row in two] == [row["loss"] for row in again]
    assert all(row["communication_s"] >= 0 for row in two)
    assert run.attempt(0).metrics(1).is_file()


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("make", "mode", "more"),
    [
        ("recurrent", "fsdp", ""),  # cuDNN copies weights
        *(("tied", mode, "compile: true, ") for mode in ("zero1", "zero2", "zero3", "fsdp", "ddp")),
        *(("tied", mode, "compiled") for mode in ("zero1", "zero3", "fsdp", "ddp")),
    ],
)
def test_own_models_tied_compiled_or_recurrent_train_as_plain_ones(
    tmp_path: Path, make: str, mode: str, more: str
) -> None:
    net = ROOT / "tests" / "support" / "made" / "net.py"
    text = f"ranks_per_node: 2\ntrain: {{data: {{make: '{net}:noisy'}}, batch_size: 12, steps: 4, device: cuda, "
    plain = text + f"model: {{make: '{net}:{make}'}}, mode: allreduce}}"
    args = ", args: {compile: true}" if more == "compiled" else ""
    other = text + f"{more.replace('compiled', '')}model: {{make: '{net}:{make}'{args}}}, mode: {mode}}}"
    _, wanted = train(tmp_path / "plain", plain)
    _, found = train(tmp_path / "other", other)
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in wanted], rel=1e-3)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("keys", "rel"),
    [
        ("mode: bucketed, cuda_graph: true", 1e-3),
        ("mode: zero1, cuda_graph: true", 1e-3),
        ("mode: zero3", 1e-3),
        ("mode: fsdp", 1e-3),
        ("mode: ddp", 1e-3),
        ("mode: 1f1b, microbatches: 3", 1e-3),
        ("mode: tensor", 1e-3),
        ("mode: bucketed, precision: bf16", 3e-2),
    ],
)
def test_padded_batches_give_the_losses_of_one_process(tmp_path: Path, keys: str, rel: float) -> None:
    padded = ROOT / "tests" / "support" / "made" / "padded.py"
    gpt = "{d_model: 16, d_ff: 32, layers: 4, heads: 2, context: 8, vocabulary: 16}"
    text = f"train: {{model: {gpt}, data: {{make: '{padded}:padded'}}, batch_size: 12, steps: 9, device: cuda, "
    _, wanted = train(tmp_path / "one", f"ranks_per_node: 1\n{text}mode: single}}")
    _, found = train(tmp_path / "two", f"ranks_per_node: 2\n{text}{keys}}}")
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in wanted], rel=rel)


@pytest.mark.gpu(2)
def test_pretend_nodes_divide_the_gpus(tmp_path: Path) -> None:
    code = "import os, torch; print(os.environ['CUDA_VISIBLE_DEVICES'], torch.cuda.device_count())"
    live = LiveRun(tmp_path, f"nodes: 2\ncommand: {json.dumps([sys.executable, '-c', code])}\n")
    assert live.end() == 0, live.err
    seen = [live.run.attempt(0).out(rank).read_text().split() for rank in range(2)]
    devices = [set(each[0].split(",")) for each in seen]
    assert not devices[0] & devices[1]
    assert [int(each[1]) for each in seen] == [len(each) for each in devices]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("mode", ["allreduce", "flat", "bucketed"])
def test_exact_on_one_and_two_gpus_has_the_same_bits(tmp_path: Path, mode: str) -> None:
    text = job(mode=mode) + "  exact: true\n"
    _, one = train(tmp_path / "one", text)
    _, two = train(tmp_path / "two", text.replace("ranks_per_node: 1", "ranks_per_node: 2"))
    assert [row["loss"] for row in one] == [row["loss"] for row in two]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("mode", [*SHARED, "bucketed\n  communication_dtype: bf16\n  bucket_size_mb: 4"])
def test_verify_passes_on_two_gpus(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(job(ranks=2, mode=mode))
    argv = [sys.executable, "-m", "muster", "verify", str(path), "--steps", "2", "--runs", str(tmp_path / "runs")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout


@pytest.mark.gpu(2)
@pytest.mark.parametrize("more", ["", "  sequence_parallel: true\n  precision: bf16\n"], ids=["fp32", "sequence, bf16"])
def test_split_layers_compute_on_two_gpus_what_one_does(tmp_path: Path, more: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(job(ranks=2, mode=TENSOR, model="gpt-nano", data="synthetic") + more)
    argv = [sys.executable, "-m", "muster", "verify", str(path), "--steps", "2", "--runs", str(tmp_path / "runs")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS  class near" in done.stdout


@pytest.mark.gpu(2)
@pytest.mark.parametrize("mode", ["ddp", TENSOR])
def test_a_gpt_trains_on_two_gpus(tmp_path: Path, mode: str) -> None:
    _, rows = train(tmp_path / "gpt", job(ranks=2, mode=mode, model="gpt-micro", data="python-source"))
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_more_cuda_ranks_than_devices_are_refused(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, job(ranks=64))
    assert live.end() == 78
    assert "train.device: cuda:" in live.err


def test_a_training_on_cuda_goes_on_bit_by_bit_from_copies_made_beside_its_steps(tmp_path: Path) -> None:
    settings = {**VGG, "mode": "single", "device": "cuda", "deterministic": True, "steps": 12, "model": "vgg11"}
    settings |= {"batch_size": 64, "optimizer": ADAMW, "log_every": 1}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert attempt_apart(parts, settings, stop_at=5)[0] == 75
    for lost in (parts / "checkpoints").glob("step-00000005.*"):  # what was saved at the end, with the device waiting
        lost.rename(lost.with_name(f"bad-{lost.name}"))
    code, resumed = attempt_apart(parts, settings, number=1)
    assert (code, attempt_apart(whole, settings)) == (0, [0, resumed])


@pytest.mark.gpu(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_slices_of_sequences_train_on_two_gpus_as_whole_ones_on_one(tmp_path: Path, precision: str) -> None:
    path = tmp_path / "job.yaml"
    split = "parallel: {pipe: 2, schedule: terapipe, microbatches: 2, tokens: [40, 16, 8]}"
    text = job(ranks=2, model="gpt-nano", data="synthetic").replace("mode: ddp", split)
    path.write_text(text + f"  precision: {precision}\n")
    argv = [sys.executable, "-m", "muster", "verify", str(path), "--steps", "2", "--runs", str(tmp_path / "runs")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS  class near" in done.stdout
