"""Sessions on CUDA devices: what a killed rank costs, and what a resume on other ranks finds. Needs two GPUs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from muster.jobs.basics.files import read_lines
from support.live import LiveRun, wait_until

pytestmark = [pytest.mark.command, pytest.mark.gpu(2), pytest.mark.ranks]

PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import muster

kind, steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
run = muster.session()
torch.cuda.set_device(run.device)
torch.use_deterministic_algorithms(True)
dist.init_process_group("nccl")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(run.device)
if kind == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
else:
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = run.state(model=model, optimizer=optimizer)
for step in run.steps(steps, state):
    generator = torch.Generator().manual_seed(step)
    whole = torch.randn(16, 256, generator=generator)                # the same global batch on any number of ranks
    x = whole.chunk(run.world_size)[run.rank].to(run.device)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.log(loss=loss, samples=len(x))
    time.sleep(pause_s)
total = sum(getattr(each.detach(), "full_tensor", each.detach)().double().abs().sum() for each in model.parameters())
if run.is_main:
    run.path("total").write_text(repr(float(total)))
dist.destroy_process_group()
"""
STEPS = 40


def start(folder: Path, kind: str, *, ranks: int, pause_s: float = 0.0) -> LiveRun:
    folder.mkdir()
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = json.dumps([sys.executable, str(program), kind, str(STEPS), str(pause_s)])
    env = "{CUBLAS_WORKSPACE_CONFIG: ':4096:8'}"
    text = f"ranks_per_node: {ranks}\ncheckpoint: {{every_steps: 15}}\nrestart: {{}}\nenv: {env}\ncommand: {command}\n"
    return LiveRun(folder, text)


def total(live: LiveRun) -> float:
    return float((live.run.path / "files" / "total").read_text())


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_killed_rank_costs_nothing_but_time(kind: str, tmp_path: Path) -> None:
    whole = start(tmp_path / "whole", kind, ranks=2)
    assert whole.end() == 0, whole.err
    hurt = start(tmp_path / "hurt", kind, ranks=2, pause_s=0.1)
    hurt.wait_for("saved")
    wait_until(lambda: any(row["step"] > 16 for row in read_lines(hurt.run.metrics)), "steps that will be done again")
    os.kill(hurt.pid_of(1), signal.SIGKILL)
    assert hurt.end() == 0, hurt.err
    assert len(hurt.events("attempt")) == 2
    assert total(hurt) == total(whole)
    assert "the same losses, bit for bit" in hurt.run.attempt(1).out(0).read_text() + hurt.out


def test_fsdp2_continues_on_one_gpu(tmp_path: Path) -> None:
    whole = start(tmp_path / "whole", "fsdp2", ranks=2)
    assert whole.end() == 0, whole.err
    first = start(tmp_path / "first", "fsdp2", ranks=2, pause_s=0.1)
    first.wait_for("saved")
    first.interrupt()
    assert first.end() != 0
    argv = [sys.executable, "-m", "muster", "resume", first.run.run_id, "--runs", str(first.root), "-n", "1"]
    again = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stderr
    wait_until((first.run.path / "files" / "total").exists, "the end")
    assert total(first) == pytest.approx(total(whole), rel=1e-5)
