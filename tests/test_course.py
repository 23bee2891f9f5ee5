"""Commands of docs/course.md: their options exist, and their settings fit a job. Its console blocks run elsewhere.

Programs of `jobs/examples/course/` that need several ranks run here.
"""

import os
import re
import shlex
import sys
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest
import torch

from muster.jobs.spec.load import load_job
from muster.launch.cli import command_of
from muster.launch.common.kinds import KINDS
from muster.launch.common.program_words import parse
from support.bench import free_port
from support.programs import Programs

pytestmark = pytest.mark.command

ROOT = Path(__file__).parents[1]
COURSE: Final = ROOT / "jobs/examples/course"
PAGE = (ROOT / "docs/course.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"`(muster [^`]+)`", PAGE)))
ROW: Final = r"^ +(\d+) +(\d+) +[\d.]+ +(0\.\d+)$"  # update, parts, seconds, loss
SETTINGS = sorted({each for each in re.findall(r"`([^`]*--set [^`]+)`", PAGE) if "--parameters" not in each})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_has_these_options(command: str) -> None:
    parser, rest, _, _ = command_of(shlex.split(command)[1:])
    parse(parser, rest)


@pytest.mark.parametrize("words", SETTINGS)
def test_settings_of_the_page_fit_a_job(words: str) -> None:
    given = shlex.split(words)
    overrides = [value for option, value in pairwise(given) if option == "--set"]
    swept = [value.split(",")[0] for option, value in pairwise(given) if option == "--grid"]
    default = "jobs/examples/gpt-nano.yaml" if "tensor" in words else "jobs/examples/vgg11.yaml"
    job = next((each for each in given if each.endswith(".yaml") and each != "JOB.yaml"), default)
    load_job(ROOT / job, KINDS, (*overrides, *swept), allow_unread=True)


def program(name: str) -> ModuleType:
    """Import a program of the course."""
    spec = spec_from_file_location(name, COURSE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # a dataclass looks for its module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def by_one_process(parameter_server: ModuleType, *, steps: int, workers: int, batch: int, lr: float) -> list[float]:
    """Return the loss after each step of SGD on the whole batches of the bulk-synchronous training."""
    module = parameter_server.network(0)
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=lr), list[float]()
    inputs, targets = parameter_server.part(parameter_server.TEST_PART, parameter_server.TEST_SAMPLES, 0)
    for step in range(steps + 1):
        with torch.no_grad():
            losses.append(torch.nn.functional.mse_loss(module(inputs), targets).item())
        parts = [parameter_server.part(step * workers + worker, batch, 0) for worker in range(workers)]
        whole_inputs, whole_targets = (torch.cat(each) for each in zip(*parts, strict=True))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(whole_inputs), whole_targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return losses


def by_ranks(programs: Programs, count: int, name: str, *options: str) -> str:
    """Run a program on ranks that are told what torchrun tells; return what rank 0 prints."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    environs = [{**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    started = [programs.start(COURSE / f"{name}.py", *options, env=environ) for environ in environs]
    ended = [each.wait() for each in started]
    assert [each.returncode for each in ended] == [0] * count, ended
    return ended[0].stdout


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(250)
@pytest.mark.parametrize(("start", "ranks"), [("muster", 2), ("torchrun", 3)])
def test_replicas_and_ddp_train_as_one_process_and_move_these_bytes(
    tmp_path: Path, programs: Programs, start: str, ranks: int
) -> None:
    options = ["--steps", "4", "--width", "256"]
    if start == "torchrun":
        printed = by_ranks(programs, ranks, "replicas", *options)
    else:
        argv = ["run", "-n", str(ranks), "--runs", tmp_path, COURSE / "replicas.py", *options]
        done = programs.run("-m", "muster", *argv, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done
        printed = done.stdout
    row = re.compile(r"^(.*\S) +[\d.]+ +([\d.]+) +(\d\.\de[+-]\d\d) +([\d.]+) MB +([\d.]+) MB$", re.MULTILINE)
    rows = {name.strip(): found for name, *found in row.findall(printed)}
    assert list(rows) == ["one process", "replicas", "ddp"]
    assert len({loss for loss, *_ in rows.values()}) == 1
    assert max(float(difference) for _, difference, *_ in rows.values()) < 2e-6  # float32: another order of sums
    width, samples = 256, 32
    parameters = 4 * ((256 + 1) * width + 2 * (width + 1) * width + (width + 1) * 10)
    inputs, outputs = (4 * samples * each for each in (256, 10))
    sent = (ranks - 1) * (parameters + inputs + outputs)  # and the gradients of the outputs
    received = (ranks - 1) * (parameters + outputs)
    ring = 2 * (ranks - 1) / ranks * parameters
    assert rows["replicas"][2:] == [f"{nbytes / 1e6:.3f}" for nbytes in (sent, received)]
    assert rows["ddp"][2:] == [f"{ring / 1e6:.3f}"] * 2


@pytest.mark.ranks
@pytest.mark.slow
def test_only_asynchronous_gradients_are_stale_and_bulk_synchronous_ones_train_as_one_process(
    programs: Programs,
) -> None:
    options = ["--steps", "60", "--batch", "16", "--lr", "0.3", "--ms", "1", "--slow", "5"]
    together, alone = by_ranks(programs, 4, "asynchronous", *options).split("\nasynchronous: ")
    rows = [
        [(int(update), int(parts), float(loss)) for update, parts, loss in re.findall(ROW, text, re.MULTILINE)]
        for text in (together, alone)
    ]
    assert "staleness of 180 gradients: mean 0.00, max 0\n" in together
    assert int(re.findall(r"max (\d+)", alone)[0]) > 0
    assert [each[-1][:2] for each in rows] == [(60, 180), (180, 180)]
    assert all(each[-1][2] < 0.8 * each[0][2] for each in rows)
    losses = by_one_process(program("asynchronous"), steps=60, workers=3, batch=16, lr=0.3)
    assert [loss for _, _, loss in rows[0]] == pytest.approx([losses[update] for update, _, _ in rows[0]], abs=1e-6)
