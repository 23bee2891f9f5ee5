"""The measurement behind `muster advise`, in real processes."""

import json
import sys
from pathlib import Path

import pytest

from muster.collectives_bench.cost.advice.measured import LayerTimes
from muster.jobs.basics.boot import module_argv
from muster.jobs.spec.load import load_job
from muster.jobs.spec.plain import spelled
from muster.launch.common.kinds import KINDS
from support.programs import Programs

pytestmark = [pytest.mark.command, pytest.mark.slow]


def measured(programs: Programs, folder: Path, train: dict[str, object], **asked: object) -> dict[str, object]:
    (folder / "job.yaml").write_text(json.dumps({"name": "layers", "nodes": 2, "train": train}))
    job = load_job(folder / "job.yaml", KINDS, []).job
    request = {"job": spelled(job), "ranks": 2, "samples": [2, 1], "variants": {}, "threads": 1, **asked}
    (folder / "request").write_text(json.dumps(request))
    _, _, *argv = module_argv(sys.executable, "muster.jobs.train.timing.layers")
    done = programs.run(*argv, stdin=folder / "request")
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_two_processes_time_passes_layers_updates_and_messages(programs: Programs, tmp_path: Path) -> None:
    small = {"d_model": 16, "d_ff": 32, "layers": 2, "heads": 2, "context": 16}
    train = {"model": small, "data": "synthetic", "batch_size": 4, "device": "cpu"}
    record = measured(
        programs, tmp_path, train, variants={"activation_checkpointing": {"activation_checkpointing": True}}
    )
    times = LayerTimes.model_validate_json(json.dumps({**record, "muster_layers": 1}))
    assert {(each.samples, each.active) for each in times.passes} == {(2, 1), (1, 1), (2, 2), (1, 2)}
    assert [each.name for each in times.layers] == ["embed", "block1", "block2", "norm", "head"]
    assert all(sum(times.pass_s(each.samples, each.active)) > 0 for each in times.passes)
    assert times.factor("activation_checkpointing") is not None
    assert times.messages["cpu_s_per_byte"] > 0
    assert times.shares(["block1", "block2"]) is not None
    assert {(each.mode, each.microbatches, each.samples) for each in times.steps} == {
        ("zero1", 2, 2),
        ("gpipe", 8, 1),
        *((mode, 2, size) for mode in ("flat", "gpipe", "1f1b", "zb1p", "terapipe") for size in (1, 2)),
    }
    assert all(each.cpu_s > 0 for each in times.steps)


def test_a_model_that_cannot_be_built_is_refused(programs: Programs, tmp_path: Path) -> None:
    train = {"model": {"make": "nothing.py:build"}, "data": "digits", "batch_size": 4, "device": "cpu"}
    assert "nothing.py" in str(measured(programs, tmp_path, train)["refused"])
