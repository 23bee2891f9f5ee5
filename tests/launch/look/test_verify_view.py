"""The page of `muster verify`, from records; and the command itself on every mode."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from muster.jobs.spec.modes import MODES
from muster.launch.look.verify_view import render
from support.terminals import through_pipes

pytestmark = [pytest.mark.command, pytest.mark.slow]

LONG_NAME = "block2.attention.output.weight"


def row(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    equal = {"bitwise": True, "ulp": 0, "difference": 0.0, "tolerance": 0.0, "ok": True, "drift": None}
    return {"name": name, "kind": kind, "shape": [64, 64], **equal, **fields}


def record(*rows: dict[str, Any], **fields: Any) -> dict[str, Any]:
    whole = {
        "job": "nano",
        "mode": "ddp",
        "split": "ddp",
        "exact": False,
        "world_size": 3,
        "virtual_ranks": 3,
        "device": "cpu",
    }
    whole |= {"precision": "fp32", "steps": 1, "batch_size": 16, "class": "bitwise", "why": "the same order"}
    whole |= {"losses": [{"step": 1, "mode": 5.5, "reference": 5.5}], "differing_ranks": {}, "pass": True}
    return {**whole, "rows": list(rows), **fields}


def page(record: dict[str, Any]) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render(record))
    return console.export_text()


def test_equal_tensors_are_said_to_be_bitwise_equal_and_pass() -> None:
    text = page(record(row(LONG_NAME, "gradient"), row(LONG_NAME, "parameter")))
    (line,) = [line for line in text.splitlines() if line.startswith("block2")]
    assert line.split()[0] == LONG_NAME
    assert line.count("bitwise equal") == 2
    assert "PASS  class bitwise: the same order; 2 of 2 comparisons bitwise equal" in text


def test_a_gradient_within_its_bound_shows_its_distance() -> None:
    near = {"bitwise": False, "ulp": 744, "difference": 7.3e-12, "tolerance": 9.4e-11}
    rows = row(LONG_NAME, "gradient", **near), row(LONG_NAME, "parameter", drift=4.8e-07)
    text = page(record(*rows, **{"class": "tight"}))
    assert "744 ulp, 7.3e-12" in text
    assert "PASS" in text
    assert "differs by up to 4.8e-07" in " ".join(text.split())


def test_of_split_layers_losses_and_outputs_are_within_what_rounding_reaches() -> None:
    near = {"bitwise": False, "ulp": 3, "difference": 2.1e-07, "tolerance": 4.4e-06}
    text = page(record(row(LONG_NAME, "parameter"), row("output on test batch", "output", **near), **{"class": "near"}))
    assert "3 ulp, 2.1e-07" in text
    assert "class near: the same order; 1 of 2 comparisons bitwise equal, the others within the bound" in " ".join(
        text.split()
    )


def test_what_is_outside_the_class_is_named_and_fails() -> None:
    far = {"bitwise": False, "ulp": 99_999, "difference": 0.5, "ok": False}
    rows = row("norm.weight", "gradient", **far), row("norm.weight", "parameter")
    text = page(record(*rows, **{"pass": False, "differing_ranks": {"norm.weight": [2]}}))
    assert "0.5: not bitwise equal" in " ".join(text.split()).replace("5.0e-01", "0.5")
    assert "FAIL" in text
    assert "1 of the gradients exceed the bound: norm.weight" in text
    assert "rank 2 differs from rank 0 in norm.weight" in text


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["gather_scatter", "bucketed"])  # one of each class; test_verify.py has all modes
def test_a_mode_holds_its_promise(mode: str, tmp_path: Path) -> None:
    ranks = 3
    job = tmp_path / "job.yaml"
    model = "{d_model: 16, d_ff: 32, layers: 2, heads: 2, context: 16}"
    settings = f"{{model: {model}, data: synthetic, mode: {mode}, batch_size: 7, steps: 2}}"
    job.write_text(f"ranks_per_node: {ranks}\ntrain: {settings}\n")
    code, out, err = through_pipes("verify", str(job), "--steps", "2", "--runs", str(tmp_path / "runs"), "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["pass"]
    assert found["class"] == MODES[mode].exactness(ranks)
    assert found["world_size"] == ranks


def test_only_training_can_be_verified(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("command: ['true']\n")
    code, _, err = through_pipes("verify", str(job), "--runs", str(tmp_path / "runs"))
    assert code == 2
    assert "is a command: job; only train: jobs can be verified" in err
    assert not (tmp_path / "runs").exists()
