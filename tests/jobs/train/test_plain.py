"""Ranks read a checked job as plain values, and train in a Python that has torch and no package of Muster's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.jobs.basics.sections import changed, given, replaced, values
from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.machine import ports
from muster.jobs.models.model_shape import resolve_shape
from muster.jobs.spec.job import Job
from muster.jobs.spec.kept import kept_settings
from muster.jobs.spec.plain import plain_job, spelled
from muster.jobs.spec.rules import TrainRules
from muster.jobs.spec.train import TrainSettings

ROOT = Path(__file__).parents[3]
GPT = {"d_model": 32, "d_ff": 64, "layers": 4, "heads": 4, "dropout": 0.1}
SECTIONS: tuple[tuple[int, dict[str, object]], ...] = (
    (4, {"model": "vgg11", "data": "digits", "mode": "bucketed", "exact": True, "batch_size": 8, "epochs": 2}),
    (8, {"model": GPT, "data": "synthetic", "parallel": {"data": 2, "pipe": 2, "tensor": 2, "zero": 1}}),
    (2, {"model": GPT, "data": {"text": "book.txt"}, "mode": "gpipe", "cut": [0, "block2"]}),
    (2, {"model": {"make": "a.py:b", "args": {"values": {"x": [1]}}}, "data": {"make": "a:c"}, "loss": "a:d"}),
    (2, {"model": "vgg11", "data": "cifar10", "mode": "zero2", "grad_accumulation": 2, "profile": {"steps": 2}}),
)
PROPERTIES = [name for name, value in vars(TrainRules).items() if isinstance(value, property)]
METHODS = [name for name, value in vars(TrainRules).items() if callable(value) and not name.startswith("_")]


def job_of(section: dict[str, object], **keys: object) -> Job:
    """Check a `train:` job."""
    return Job.model_validate({"kind": "train", "settings": TrainSettings.model_validate(section), **keys})


@pytest.mark.parametrize(("size", "section"), SECTIONS)
def test_the_rules_of_a_plain_section_are_those_of_the_checked_one(size: int, section: dict[str, object]) -> None:
    checked = job_of(section, checkpoint={"every_steps": 5}, env={"A": "1"})
    plain = plain_job(json.loads(json.dumps(spelled(checked))))
    assert (plain.name, plain.start_timeout_s, plain.checkpoint.keep) == ("job", 60.0, 3)
    ours, theirs = plain.settings, checked.settings
    assert "is_pipeline" in PROPERTIES
    assert "split" in METHODS
    assert [getattr(ours, rule) for rule in PROPERTIES] == [getattr(theirs, rule) for rule in PROPERTIES]
    assert [getattr(ours, rule)(size) for rule in METHODS] == [getattr(theirs, rule)(size) for rule in METHODS]
    if ours.model.make is None:
        assert resolve_shape(ours.model, 300) == resolve_shape(theirs.model, 300)
    for read in (values, changed, given):
        assert read(ours) == read(theirs)
        assert read(ours.optimizer) == read(theirs.optimizer)
    assert kept_settings(ours, samples=9, virtual_ranks=4) == kept_settings(theirs, samples=9, virtual_ranks=4)
    assert values(replaced(ours, deterministic=True)) == values(replaced(theirs, deterministic=True))
    assert not ours.deterministic


IN_A_BARE_PYTHON = """
import json, os, sys, torch
missing = ("pydantic", "pydantic_core", "annotated_types", "yaml", "rich", "numpy")
sys.modules.update(dict.fromkeys(missing))  # None: an import of it fails
import muster.jobs.train.verify
from muster.jobs.train.main import run_rank
codes = []
for payload, environments in json.load(sys.stdin):
    ranks = []
    for environment in environments:
        if (rank := os.fork()) == 0:
            os.environ.update(environment)
            not_needed = ("torch._dynamo", "sympy", "triton")
            code = run_rank(payload) or 8 * (not torch.are_deterministic_algorithms_enabled())
            os._exit(code or 9 * any(name in sys.modules for name in not_needed))
        ranks.append(rank)
    codes += [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
print(json.dumps(codes))
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_train_and_save_without_pydantic_yaml_and_a_compiler(tmp_path: Path) -> None:
    orders = []
    for mode, size in (("single", 1), ("bucketed", 2), ("zero3", 2), ("tensor", 2), ("1f1b", 2)):
        section = {"model": GPT, "data": "synthetic", "mode": mode, "batch_size": 8, "steps": 3, "log_every": 1}
        job = job_of({**section, "evaluate": False, "deterministic": True}, checkpoint={"every_steps": 2})
        assert not job.settings.uses_compiler
        with ports.bind("127.0.0.1", backlog=1) as free:
            port = free.getsockname()[1]
        run = str(tmp_path / mode)
        environments = [
            RankEnv(rank, size, rank, size, 0, 1, "127.0.0.1", port, run_id="run", run_dir=run).variables()
            for rank in range(size)
        ]
        orders.append([{"job": spelled(job), "saving": True, "resume": None}, environments])
    ended = subprocess.run(
        [sys.executable, "-c", IN_A_BARE_PYTHON],
        input=json.dumps(orders),
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(ended.stdout.splitlines()[-1]) == [0] * 9, ended.stderr
    for mode in ("single", "bucketed", "zero3"):
        rows = [json.loads(line) for line in (tmp_path / mode / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]
        assert len(list((tmp_path / mode).rglob("MANIFEST.json"))) == 2
