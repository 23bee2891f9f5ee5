"""The benchmarks of `zero` at a small scale: what a rank measures on real ranks, and how it is judged."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # ranks import this file without its conftest

import zero_step
import zero_wire

from muster.jobs.world.world import World

pytestmark = pytest.mark.slow

STEPS = (("vgg11", zero_step.FAMILIES["stages 1, 2"]), ("gpt-5m", ("zero3", "ddp")))  # fsdp2 takes 2 s to import


def small(world: World) -> list:
    steps = [zero_step.measure(model, sides, repeats=2, steps=1, tiny=True) for model, sides in STEPS]
    sides = [zero_wire.ALONE, "zero1", "zero2 exact", "zero3", "ddp"]
    return [*steps, zero_wire.measure("vgg11", sides, repeats=1, steps=1, tiny=True)]


@pytest.mark.ranks
def test_all_sides_train_the_same_model_and_all_of_them_are_timed(on_ranks):
    mine, theirs = on_ranks(2, small)
    assert mine == theirs  # CPU time is the sum of all ranks, wall time the slowest one's
    *steps, sent = mine
    for found, (_, sides) in zip(steps, STEPS, strict=True):
        assert found["apart"]["gradients"] <= zero_step.SAME_GRADIENTS
        assert found["apart"]["weights"] <= zero_step.SAME_WEIGHTS
        assert {side: len(times) for side, times in found["times"].items()} == dict.fromkeys(sides, 2)
    assert sent["apart"] == 0.0  # of weights that all sides move by the same amount
    assert {side for side, found in sent["sides"].items() if found["bare"]} == {"zero1", "zero2 exact", "zero3"}


def found(**sides: tuple[float, float]) -> dict:
    times = {side.replace("_", ", "): [pair] * 3 for side, pair in sides.items()}
    return {"times": times, "apart": {"gradients": 0.0, "weights": 0.0}}


@pytest.mark.parametrize(
    ("cpu", "wall", "model", "reached"),
    [
        (0.85, 0.85, "gpt-5m", (True, True)),
        (0.86, 0.80, "gpt-5m", (False, True)),
        (0.80, 0.98, "gpt-5m", (False, False)),
        (0.85, 0.83, "vgg11", (False, True)),
    ],
)
def test_a_claim_holds_where_both_clocks_reach_it(cpu, wall, model, reached, capsys):
    measured = found(zero1=(cpu, wall), zero_defaults=(1.0, 1.0), zero_tuned=(1.0, 1.0), zero2=(9.0, 9.0))
    rows = zero_step.rows_of("here", model, [measured])
    assert [(row["ours"], row["against"], row["reached"]) for row in rows] == [
        ("zero1", "zero, defaults", reached[0]),
        ("zero1", "zero, tuned", reached[1]),
        ("zero2", "zero, defaults", True),  # no claim: it stands beside
        ("zero2", "zero, tuned", True),
    ]
    zero_step.show(rows, steps=1)
    assert "NOT the same work" not in capsys.readouterr().out


def test_other_work_is_no_claim(capsys):
    measured = {**found(zero3=(0.1, 0.1), ddp=(1.0, 1.0)), "apart": {"gradients": 0.0, "weights": 0.1}}
    (row,) = zero_step.rows_of("here", "vgg11", [measured])
    assert not row["reached"]
    zero_step.show([row], steps=1)
    assert "NOT the same work" in capsys.readouterr().out


def test_links_are_held_to_the_rings_volume_in_time_and_bytes():
    sides = {
        "zero1": {"steps": [(9.0, 1.5e6 * 1.1)], "bare": [0.0150 * 1.09]},
        "zero1 exact": {"steps": [(9.0, 1.5e6)], "bare": [0.0150 * 1.14]},
        "zero2": {"steps": [(9.0, 1.5e6 * 1.2)], "bare": [0.0150]},
        "zero3": {"steps": [(9.0, 2.25e6)], "bare": [0.0225 * 1.2]},
        "ddp": {"steps": [(9.0, 9e6)], "bare": []},
    }
    rows = zero_wire.rows_of("vgg11", {"nbytes": 10**6, "apart": 0.0, "sides": sides}, ranks=4, bits_s=8e8)
    assert {row["side"]: row["reached"] for row in rows} == {
        "zero1": True,
        "zero1 exact": True,
        "zero2": False,
        "zero3": False,
        "ddp": True,  # beside
    }
    assert rows[0]["time"] == pytest.approx(1.09)
    assert rows[3]["bytes"] == pytest.approx(1.0)
