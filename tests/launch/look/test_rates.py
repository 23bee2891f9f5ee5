"""Every command shows batch x steps / time as the rate of a run, in every mode and product, on real ranks."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.modes import MODES
from muster.launch.look.comparison import compared
from muster.launch.look.plots.series import plot_of
from muster.launch.look.steps import Measured, read_measured
from muster.launch.records.runrows import step_rate
from support.measured_runs import make_run
from support.programs import Programs

pytestmark = pytest.mark.command

GPT = {"d_model": 32, "d_ff": 64, "layers": 4, "heads": 2, "context": 32, "vocabulary": 64}
TOKENS = 8 * 32  # of a batch
PROGRAM = """import muster, torch.distributed
torch.distributed.init_process_group("gloo")
run = muster.session()
for _ in run.steps(12):
    run.log(loss=1.0)
"""
PRODUCTS: dict[str, dict[str, Any]] = {
    "data x pipe": {"data": 2, "pipe": 2},
    "data x pipe, zero": {"data": 2, "pipe": 2, "zero": 1},
    "data x tensor": {"data": 2, "tensor": 2},
    "data x tensor, zero": {"data": 2, "tensor": 2, "zero": 2},
    "pipe x tensor": {"pipe": 2, "tensor": 2, "microbatches": 2},
}


def trained(programs: Programs, root: Path, split: dict[str, Any], ranks: int) -> RunDir:
    train = {"model": GPT, "data": "synthetic", "batch_size": 8, "steps": 7, "log_every": 3, "evaluate": False}
    (root / "job.yaml").write_text(yaml.safe_dump({"ranks_per_node": ranks, "train": {**train, **split}}))
    return begun(programs, root, ranks, "-m", "muster.jobs.train", "job.yaml", "--runs", "runs")


def begun(programs: Programs, root: Path, ranks: int, *argv: str) -> RunDir:
    """Run a program on ranks of this machine, as torchrun does; return the folder of the run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ours = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "MUSTER_RUNS": str(root / "runs"), "OMP_NUM_THREADS": "1"}
    ours |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    each = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    started = [programs.start(*argv, cwd=root, env={**os.environ, **ours, **own}) for own in each]
    for ended in [rank.wait() for rank in started]:
        assert ended.returncode == 0, ended.stderr
    return RunDir(next((root / "runs").glob("[!.]*")))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("mode", [*MODES, *PRODUCTS])
def test_the_rate_is_that_of_the_global_batch(programs: Programs, tmp_path: Path, mode: str) -> None:
    product = PRODUCTS.get(mode)
    ranks = 4 if product else 1 if mode == "single" else 2
    run = trained(programs, tmp_path, {"parallel": product} if product else {"mode": mode}, ranks)
    measured = read_measured(run, skip=1)
    agree(measured, TOKENS)
    (row,) = compared({"a": [measured]}, "a")
    if ranks > 1:
        assert row.parts_s["communication"] > 0.0
    rate = step_rate(run)
    assert rate is not None
    newest = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    rates = [TOKENS / each["step_s"] for each in newest if "step_s" in each]
    assert min(rates) * 0.999 <= rate.median <= max(rates) * 1.001


def agree(measured: Measured, units: float) -> None:
    """Check the rates of `compare` and `plot`."""
    seconds = sum(step.seconds for step in measured.steps)
    rows, groups = compared({"a": [measured]}, "a"), {"a": [measured]}
    assert rows[0].rate == pytest.approx(units * len(measured.steps) / seconds)
    assert plot_of("throughput", rows, groups).series[0].y == pytest.approx((rows[0].rate,))


@pytest.mark.ranks
@pytest.mark.slow
def test_a_program_that_logs_no_samples_has_its_steps_counted_once(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    measured = read_measured(begun(programs, tmp_path, 2, "program.py"), skip=1)
    assert (measured.ranks, measured.unit) == (2, "steps/s")
    agree(measured, 1.0)


@pytest.mark.parametrize("known", [30, 12, 0])
def test_steps_that_rank_0_has_not_reported_yet_count_as_the_others(tmp_path: Path, known: int) -> None:
    run = make_run(tmp_path, "one")  # two ranks, of 8 x 64 tokens each
    rows = [{"step": step, "step_s": 0.5, "rate": 2 * 8 * 64, "loss": 1.0} for step in range(1, known + 1)]
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in rows))
    whole = 8 * 64 if known else 2 * 8 * 64  # the run's rows say that both have the same batch
    assert [step.units for step in read_measured(run).steps] == pytest.approx([whole] * 28)
