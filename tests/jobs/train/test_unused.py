"""Parameters on which the loss does not depend: every mode trains them as one process does, or refuses them by name."""

import os
import re
from pathlib import Path

import pytest

from muster.jobs.basics.errors import RefusedError
from muster.jobs.spec.job import Job
from muster.jobs.spec.modes import MODES, PIPELINES
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.verify import reproducible, verify
from muster.jobs.world.world import World

MADE = Path(__file__).parents[2] / "support" / "made"
ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1}  # moves a parameter also by a gradient of zero
KEY = {"find_unused_parameters": True}
NATIVE = ("single", "fsdp", *(mode for mode in PIPELINES if mode != "terapipe"))  # need no key
ASKING = [mode for mode in MODES if mode not in (*NATIVE, "tensor", "terapipe")]

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def ends(world: World, jobs: list[dict], uses: str = "never", form: str = "", steps: int = 3) -> list[str]:
    """Verify jobs on this rank; return of each what is wrong, or the refusal."""
    os.chdir(MADE)
    found = []
    for job in jobs:
        model = {"make": "unused.py:build", "args": {"uses": uses, "form": form}}
        model = {"make": "unused.py:layers"} if job["mode"] in PIPELINES else model
        given = {"model": model, "data": "digits", "batch_size": 24, "optimizer": ADAMW, **job}
        try:
            proof = Job(name="proof", kind="train", settings=TrainSettings.model_validate(given))
            record = verify(reproducible(proof), world, steps)
        except RefusedError as error:
            found.append(str(error))
        else:
            found.append("" if record is None else " ".join(row["name"] for row in record["rows"] if not row["ok"]))
    return found


def on_two(on_ranks, jobs: list[dict], **given) -> list[str]:
    """Return what rank 0 finds. Ranks that begin no further collective agree."""
    return on_ranks(2, ends, jobs=jobs, **given)[0]


def test_unused_parameters_are_trained_as_in_one_process(on_ranks):
    many = [{"mode": mode, **(KEY if mode in ASKING else {})} for mode in (*ASKING, *NATIVE) if mode != "single"]
    more = [
        {"mode": mode, **KEY, **keys}
        for mode in ("bucketed", "zero3")
        for keys in ({"exact": True, "clip_norm": 0.5}, {"precision": "pure_bf16"}, {"grad_accumulation": 2})
    ]
    assert set(on_two(on_ranks, many + more)) == {""}
    assert on_ranks(1, ends, group=False, jobs=[{"mode": "single"}]) == [[""]]


def test_so_are_parameters_that_only_some_ranks_use(on_ranks):
    jobs = [{"mode": mode, **KEY} for mode in ASKING]
    assert on_two(on_ranks, jobs, uses="some", steps=5) == [""] * len(jobs)


def test_without_the_key_the_refusal_names_it_and_the_parameters(on_ranks):
    for mode, said in zip(ASKING, on_two(on_ranks, [{"mode": mode} for mode in ASKING]), strict=True):
        assert re.search(r"no gradient .*blocks\.[01]\.spare\.(weight|bias)", said), (mode, said)
        assert said.endswith(
            "set train.find_unused_parameters: true; if it never does, call requires_grad_(False) on them"
        )


def test_fsdp_refuses_a_step_whose_ranks_use_different_parameters(on_ranks):
    jobs = [{"mode": "fsdp", **KEY, **more} for more in ({}, {"accumulate": "sharded", "grad_accumulation": 2})]
    for said in on_two(on_ranks, jobs, uses="some", steps=8):
        assert "only some ranks use blocks.0.spare.weight, blocks.0.spare.bias" in said
        assert "zero3 with train.find_unused_parameters: true" in said
    recomputing = [{"mode": "fsdp", **KEY, "activation_checkpointing": True}]
    assert on_two(on_ranks, recomputing, uses="always") == [""]


@pytest.mark.parametrize(("form", "why"), [("scalar", "has no dimension"), ("transposed", "is not row-major")])
def test_fsdp_refuses_a_parameter_that_has_no_rows_before_it_trains(on_ranks, form, why):
    said, other = on_two(on_ranks, [{"mode": "fsdp"}, {"mode": "allreduce"}], uses="always", form=form)
    assert said.startswith("train.mode: fsdp cannot cut odd, of shape (")
    assert why in said
    assert other == ""
