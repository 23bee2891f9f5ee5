"""Saves of several ranks: all or none, one rank's failure is all ranks' miss, and a drain stops all at one step."""

import resource
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.errors import MusterError
from muster.jobs.checkpoint.choose import newest_good
from muster.jobs.checkpoint.manifest import read_manifest
from muster.jobs.node import page
from muster.jobs.node.page import NEVER, Page
from muster.jobs.node.reports import Reporter
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.saving import saver as saving
from muster.jobs.saving.helper import WriterProcess
from muster.jobs.spec.job import Job
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.main import TrainStart, train_in
from muster.jobs.world.world import World
from support.checkpoints import Told
from support.resuming import GPT, attempt

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow]

JOB = {**GPT, "mode": "ddp", "log_every": 1, "steps": 500}


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Have the writer's modules compiled: one that may write 64 bytes a file would leave them cut short, for good."""
    argv = [*module_argv(sys.executable, "muster.jobs.checkpoint.writer"), "--help"]
    subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)


def train_beside_a_full_disk(world: World, folder: str, settings: dict, checkpoint: dict, failing: int) -> dict:
    """Train; the writers of rank 1 find a full disk, the first `failing` of its saves. Return what was told."""

    class Poor(WriterProcess):
        def order(self, order, memory):
            limit = 64 if world.rank == 1 and len(orders) < failing else resource.RLIM_INFINITY
            orders.append(order.step)
            _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (limit, hard))
            super().order(order, memory)

    orders: list[int] = []
    saving.WriterProcess = Poor
    page.own = Page()
    job = Job.model_validate(
        {"kind": "train", "settings": TrainSettings.model_validate(settings), "checkpoint": checkpoint}
    )
    told, code = Told(), -1
    try:
        code = train_in(TrainStart(RunDir(Path(folder)), 0), job, world, told)
    except MusterError as error:
        code = error.exit_code
    except RuntimeError:  # the other rank has gone
        code = 1
    return {"code": code, "orders": orders, "told": [row for row in told.rows if row["report"] in ("saved", "missed")]}


def test_a_rank_that_cannot_write_costs_all_ranks_that_save_and_not_the_next(on_ranks, tmp_path):
    job = {**JOB, "steps": 21}
    arguments = {"folder": str(tmp_path), "settings": job, "checkpoint": {"every_steps": 2}, "failing": 1}
    began = time.monotonic()
    first, second = on_ranks(2, train_beside_a_full_disk, **arguments)
    assert (first["code"], second["code"]) == (0, 0)
    assert first["orders"] == second["orders"], "all ranks or none"
    assert time.monotonic() - began < 2 * saving.PATIENCE_S, "rank 0 was told, and did not wait out its patience"
    missed = [row for row in first["told"] if row["report"] == "missed" and row["missed"]]
    assert [(row["step"], row["missed"]) for row in missed] == [(2, 1)]
    assert "no .ok of writers 1" in missed[0]["message"]
    assert "File too large" in second["told"][0]["message"]
    steps = [row["step"] for row in first["told"] if row["report"] == "saved"]
    assert steps[-1] == 21
    assert steps == first["orders"][1:]


def test_a_rank_whose_disk_stays_full_ends_the_training_with_74(on_ranks, tmp_path):
    arguments = {"folder": str(tmp_path), "settings": JOB, "checkpoint": {"every_steps": 1}, "failing": 99}
    first, second = on_ranks(2, train_beside_a_full_disk, **arguments)
    assert second["code"] == 74
    assert first["code"] in (1, 74)  # it counts to three as well, unless it loses rank 1 first
    assert newest_good(RunDir(tmp_path)) is None


def test_each_rank_writes_its_share(on_ranks, tmp_path):
    on_ranks(3, attempt, folder=str(tmp_path), settings={**GPT, "mode": "ddp", "steps": 1})
    manifest = read_manifest(CheckpointDir(next((tmp_path / "checkpoints").iterdir())))
    sizes = [0, 0, 0]
    for part in (part for tensor in manifest.tensors.values() for part in tensor.parts):
        sizes[part.writer] += part.piece.nbytes
    assert max(sizes) - min(sizes) <= 64


def drain(world: World, folder: str, settings: dict) -> list:
    """Train with a keeper that asks to hold after a while; return the exit code and where the rank stopped."""
    page.own = own = Page()
    agreed = Path(folder) / "stop-at"

    def keep() -> None:
        deadline = time.monotonic() + 30.0
        while own.steps < 5 and time.monotonic() < deadline:
            pass
        own.hold = 1
        Path(folder, f"held-{world.rank}").touch()
        while len(list(Path(folder).glob("held-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        while not agreed.exists() and time.monotonic() < deadline:
            if own.held != NEVER:  # whoever waits: the other one may be in a step that it cannot end alone
                made = agreed.with_suffix(f".{world.rank}")
                made.write_text(str(own.held + 2))
                with suppress(FileExistsError):
                    agreed.hardlink_to(made)
            time.sleep(0.001)
        own.stop_at = int(agreed.read_text())

    keeper = threading.Thread(target=keep)
    keeper.start()
    train = TrainSettings.model_validate(settings)
    job = Job.model_validate({"kind": "train", "settings": train, "checkpoint": {"every_steps": 3}})
    code = train_in(TrainStart(RunDir(Path(folder)), 0), job, world, Reporter({}))
    keeper.join()
    return [code, own.steps]


def test_ranks_that_are_drained_stop_after_one_step_all_of_them_and_save_it(on_ranks, tmp_path):
    results = on_ranks(2, drain, folder=str(tmp_path), settings=JOB)
    ((code, steps), other) = results
    assert (code, other) == (75, [75, steps])
    assert 5 <= steps < 500
    chosen = newest_good(RunDir(tmp_path))
    assert chosen is not None
    assert chosen.manifest.step == steps


def test_without_checkpoints_a_drained_rank_says_that_it_was_stopped(on_ranks, tmp_path):
    assert on_ranks(1, stopped_without_saving, folder=str(tmp_path), settings={**GPT, "mode": "single"}) == [
        [130, False]
    ]


def stopped_without_saving(world: World, folder: str, settings: dict) -> list:
    """Stop after two steps of a job that saves nothing."""
    page.own = Page()
    page.own.stop_at = 2
    job = Job.model_validate({"kind": "train", "settings": TrainSettings.model_validate(settings)})
    code = train_in(TrainStart(RunDir(Path(folder)), 0), job, world, Reporter({}))
    return [code, RunDir(Path(folder)).checkpoints.exists()]
