"""benchmarks/pipe_bubble.py at a small scale: what ranks record, and how it is judged."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # ranks import this file without its conftest

import pipe_bubble

from muster.jobs.world.world import World
from muster.pipe.schedules.costs import Costs
from muster.pipe.schedules.messages import with_messages
from muster.pipe.schedules.simulate import simulate
from muster.pipe.schedules.tables import schedule

pytestmark = pytest.mark.command

CELLS = (("sleep", "zb1p"), ("sleep", "interleaved"))


def recorded(world: World) -> list[Any]:
    return [pipe_bubble.measure(work, name, 3, steps=1, scale=0.02) for work, name in CELLS]


@pytest.mark.ranks
def test_every_action_of_a_step_is_recorded_and_drawn(on_ranks: Any, tmp_path: Path):
    found, nothing = on_ranks(2, recorded)
    assert [each["steps"] for each in nothing] == [[], []]
    for (work, name), each in zip(CELLS, found, strict=True):
        (step,) = each["steps"]
        actions = sorted(tuple(record[:4]) for record in step if record[1] in "FBIW")
        planned = schedule(name, 2, 3).actions
        assert actions == sorted((rank, a.kind, a.stage, a.microbatch) for rank, row in enumerate(planned) for a in row)
        # Nothing of a stage is shorter than what it sleeps: both ways, and W of its own where it has one.
        slept = pipe_bubble.ACTION_S * 0.02 * 2 / (1 + max(a.stage for row in planned for a in row))
        assert all(
            end - start >= slept * (2 if kind == "B" else 1) for _, kind, _, _, start, end in step if kind in "FBIW"
        )
        row = pipe_bubble.row_from(work, 2, each, tmp_path)
        assert 0 < row["measured"] < 1
        assert (tmp_path / f"{work}-{name}-3.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(("late", "reached"), [(0.0, True), (0.3, False)])
def test_a_bubble_is_held_to_the_simulated_one(late: float, reached: bool, capsys: pytest.CaptureFixture[str]):
    plan = schedule("1f1b", 4, 8)
    spans = simulate(with_messages(plan), Costs(0.01, 0.01, 0.01)).spans
    step: list[list[Any]] = [
        [rank, each.step.kind, each.step.stage, each.step.microbatch, each.start_s, each.end_s]  # type: ignore[union-attr]
        for rank, row in enumerate(spans)
        for each in row
    ]
    for record in step:
        if record[1] == "B" and record[3] == 7:  # the last backwards begin late, for no reason that the means show
            record[4], record[5] = record[4] + late, record[5] + late
    found = {"schedule": "1f1b", "microbatches": 8, "uncertainty_s": 0.0, "steps": [step]}
    row = pipe_bubble.row_from("sleep", 4, found)
    assert (row["reached"], row["points"] > 3.0) == (reached, not reached)
    assert row["simulated"] == pytest.approx(row["formula"], abs=0.05)
    pipe_bubble.show([row])
    assert ("yes" in capsys.readouterr().out) is reached
