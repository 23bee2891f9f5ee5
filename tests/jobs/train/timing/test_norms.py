"""Norms that are really timed on this CPU, in turns; and norms that cannot run."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from muster.jobs.basics.rowlog import RowLog
from muster.jobs.timing.settings import Case, TimingSettings
from muster.jobs.train.timing import norms
from muster.jobs.train.timing.launch_manager import ModelTimer
from muster.jobs.train.timing.norms import NormTask, build_call, draw_inputs
from muster.jobs.world.world import World

CPU = torch.device("cpu")
TINY = {"batch": 12, "widths": [40], "warmup": 1, "steps": 2, "launches": 2, "precision": ["fp32"]}


def conduct(world: World, folder: str, asked: dict[str, Any], fault: str) -> list[Any]:
    """Time norms as the rank of a job does; return the newest record of each row."""
    torch.set_num_threads(1)

    def raises(case: Case, *inputs: torch.Tensor) -> Any:
        if case.model == "rms" and fault == "raise":
            raise ValueError("a mistake of this norm")
        if case.model == "rms" and fault == "memory":
            return lambda: torch.empty(1 << 50)
        return build(case, *inputs)

    build, norms.build_call = norms.build_call, raises
    path = Path(folder) / "bench.jsonl"
    ModelTimer(TimingSettings.model_validate(asked), CPU, RowLog(path, patient=False, say=print), name="test").run()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return list({(row["model"], row["pass_name"]): row for row in rows if row["record"] == "timed"}.values())


def timed(on_ranks, tmp_path, fault: str = "", **changes: Any) -> dict[tuple[str, str], Any]:
    asked = {"model": ["layer", "rms", "rms_plain", "rms_fused"], **TINY, **changes}
    (rows,) = on_ranks(1, conduct, group=False, folder=str(tmp_path), asked=asked, fault=fault)
    return {(row["model"], row["pass_name"]): row for row in rows}


@pytest.mark.ranks
def test_norms_are_timed_in_turns_beside_a_copy_of_the_same_rows(on_ranks, tmp_path):
    rows = timed(on_ranks, tmp_path)
    assert list(rows) == [
        ("copy", "forward"),
        *[(norm, each) for each in ("forward", "backward") for norm in ("layer", "rms", "rms_plain", "rms_fused")],
    ]
    copied = rows["copy", "forward"]
    for (norm, pass_name), row in rows.items():
        if norm == "rms_fused":
            assert (row["state"], row["reason"]) == ("refused", "Triton's kernels need a GPU, x is on cpu")
            continue
        assert (row["state"], len(row["warm_up_s"]), len(row["steps_s"]), len(row["launches"])) == ("ok", 2, 4, 2)
        assert row["moved_bytes"] == 12 * 40 * 4 * (5 if pass_name == "backward" else 2)
        assert row["bytes_per_s"] == pytest.approx(row["moved_bytes"] / median(row["steps_s"]))
        assert row["copy_share"] == pytest.approx(row["bytes_per_s"] / copied["bytes_per_s"])
        assert (row["parameters"], row["width"]) == ({"copy": 0, "layer": 80}.get(norm, 40), 40)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fault", "state", "reason"),
    [("raise", "failed", "ValueError: a mistake of this norm"), ("memory", "memory", "asked for 4194304.0 GB more")],
)
def test_a_norm_that_fails_gives_the_reason(on_ranks, tmp_path, fault, state, reason):
    row = timed(on_ranks, tmp_path, fault)["rms", "forward"]
    assert row["state"] == state
    assert row["reason"].startswith(reason)


@pytest.mark.parametrize("model", ["layer", "rms", "rms_plain"])
def test_a_timed_pass_computes_the_norm_and_its_gradients(model):
    copy = Case("copy", "forward", "fp32", width=40)
    x, of_y = draw_inputs(NormTask(TimingSettings.model_validate(TINY), [copy], CPU, 1 << 40))
    assert torch.equal(build_call(copy, x, of_y)(), x)  # type: ignore[arg-type]
    y: Any = build_call(Case(model, "forward", "fp32", width=40), x, of_y)()
    of_x, *of_parameters = build_call(Case(model, "backward", "fp32", width=40), x, of_y)()  # type: ignore[misc]
    centred = x - x.mean(-1, keepdim=True) if model == "layer" else x
    wanted = centred / (centred.square().mean(-1, keepdim=True) + norms.EPSILON).sqrt()
    torch.testing.assert_close(y, wanted)
    assert not y.requires_grad
    assert of_x.shape == y.shape
    assert [each.shape for each in of_parameters] == [(40,)] * (2 if model == "layer" else 1)
