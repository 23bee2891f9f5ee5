"""Models that return mappings, dataclasses and tuples: `verify` compares every tensor in them."""

import os
from pathlib import Path

import pytest

from muster.jobs.basics.errors import RefusedError
from muster.jobs.spec.job import Job
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.reference import OUTPUT
from muster.jobs.train.verify import reproducible, verify
from muster.jobs.world.world import World

MADE = Path(__file__).parents[2] / "support" / "made"
NAMES = {
    "dataclass": [f"{OUTPUT}, logits", f"{OUTPUT}, hidden, 0", f"{OUTPUT}, label"],
    "mapping": [f"{OUTPUT}, logits", f"{OUTPUT}, more, 0"],
    "tuple": [f"{OUTPUT}, 0", f"{OUTPUT}, 1"],
}

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def compared(world: World, jobs: list[dict]) -> list[list[str] | str]:
    """Verify jobs on this rank; return of each the outputs that were compared, or what is wrong."""
    os.chdir(MADE)
    found: list[list[str] | str] = []
    for job in jobs:
        given = {"data": "digits", "batch_size": 16, "loss": "outputs.py:loss", **job}
        try:
            proof = Job(name="proof", kind="train", settings=TrainSettings.model_validate(given))
            record = verify(reproducible(proof), world, 2)
        except RefusedError as error:
            found.append(str(error))
        else:
            rows = [] if record is None else record["rows"]
            wrong = [row["name"] for row in rows if not row["ok"]]
            found.append(f"wrong: {wrong}" if wrong else [row["name"] for row in rows if row["kind"] == "output"])
    return found


def model(kind: str) -> dict:
    return {"make": "outputs.py:build", "args": {"kind": kind}}


def test_every_tensor_in_the_outputs_is_compared(on_ranks):
    jobs = [{"model": model(kind), "mode": mode} for kind in NAMES for mode in ("bucketed", "ddp", "zero3", "fsdp")]
    assert on_ranks(2, compared, jobs=jobs)[0] == [NAMES[job["model"]["args"]["kind"]] for job in jobs]


def test_the_default_loss_refuses_other_outputs_than_logits(on_ranks):
    jobs = [{"model": model("dataclass"), "mode": mode, "loss": None} for mode in ("bucketed", "zero3")]
    for said in on_ranks(2, compared, jobs=jobs)[1]:
        assert "of type Outputs; set train.loss to a function of these outputs and the targets" in said
