"""How a rank ends: exit codes and what is said, also where nothing can be said."""

import contextlib
import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.nn import functional as F

from muster.jobs.basics import exits
from muster.jobs.basics.errors import StorageError
from muster.jobs.hosts import ranks
from muster.jobs.models.shapes import POOL, VGG_SHAPES, VggShape
from muster.jobs.node.reports import Reporter
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data import open_data
from muster.jobs.train.trainer import build_trainer
from muster.jobs.world.guard import FAILED, guarded
from muster.jobs.world.world import World

pytestmark = pytest.mark.slow

TINY_VGG = VggShape("vgg-tiny", (8, POOL, 8, POOL, 16, POOL, 16, POOL, 16, POOL))
VGG = {"model": "vgg-tiny", "data": "digits", "batch_size": 4}


def full_disk(reporter: Reporter) -> int:
    raise StorageError("metrics.jsonl: No space left on device; free some space")


def print_on_full_disk(reporter: Reporter) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def own_mistake(reporter: Reporter) -> int:
    raise FileNotFoundError(errno.ENOENT, "No such file or directory")


@pytest.mark.parametrize(
    ("work", "code"), [(full_disk, exits.STORAGE), (print_on_full_disk, exits.STORAGE), (own_mistake, FAILED)]
)
def test_a_standard_error_on_the_same_full_disk_does_not_hide_the_code(
    work: Callable[[Reporter], int], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115 - closing it fails, as it must
    monkeypatch.setattr(sys, "stderr", full)
    assert guarded(work) == code
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space left"):
        full.close()


def test_a_failure_is_said_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(full_disk) == exits.STORAGE
    assert capsys.readouterr().err == "muster: metrics.jsonl: No space left on device; free some space\n"


def test_a_rank_writes_the_stack_of_every_thread_when_it_is_asked_and_goes_on() -> None:
    script = """
import os, signal, threading
from muster.jobs.train.main import run_rank
waiting = threading.Event()
threading.Thread(target=waiting.wait, daemon=True).start()
run_rank({"job": {}})  # no rank stands in the environment
os.kill(os.getpid(), signal.SIGQUIT)
waiting.set()
print("went on")
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-c", script]
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, env=environment, check=False)
    assert ended.stdout == "went on\n"
    assert "Current thread" in ended.stderr
    assert "in wait" in ended.stderr


def end_of_a_step_without_the_heads_bias(world: World, mode: str) -> list[object]:
    """Train a model whose last layer does not use its bias; return the exit code, what is reported, what is said."""

    VGG_SHAPES["vgg-tiny"] = TINY_VGG

    def work(reporter: Reporter) -> int:
        settings = TrainSettings.model_validate({**VGG, "mode": mode})
        trainer = build_trainer(settings, open_data(settings), world)
        head = trainer.engine.module.get_submodule("head")
        head.forward = lambda inputs: F.linear(inputs, head.weight)
        trainer.clock.start()
        trainer.engine.train_step(0, trainer.own_steps()[0].shards)
        return 0

    reading, writing = os.pipe()
    os.environ[ranks.STATUS_FD] = ranks.descriptor_text(writing)
    heard = io.StringIO()
    with contextlib.redirect_stderr(heard):
        code = guarded(work)
    (report,) = os.read(reading, 2**16).decode().splitlines()
    return [code, json.loads(report), heard.getvalue()]


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["allreduce", "bucketed"])
def test_a_parameter_without_gradient_ends_every_rank_with_its_name_and_makes_none_a_victim(on_ranks, mode):
    for code, report, said in on_ranks(2, end_of_a_step_without_the_heads_bias, mode=mode):
        assert code == exits.REFUSED
        assert (report["kind"], report["peer"]) == ("RefusedError", False)
        assert "got no gradient on any rank: head.bias" in report["message"]
        assert "set train.find_unused_parameters: true" in said
        assert len(said.splitlines()) == 1
