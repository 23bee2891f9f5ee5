"""What `gpu_bubble.py` makes of what its ranks said: no GPU is needed for that."""

from typing import Any

import gpu_bubble
import pipe_bubble
import pytest

from muster.pipe.schedules.costs import Costs
from muster.pipe.schedules.measured import Record
from muster.pipe.schedules.messages import with_messages
from muster.pipe.schedules.simulate import simulate
from muster.pipe.schedules.tables import schedule

pytestmark = pytest.mark.command


def said(name: str, late_s: float = 0.0) -> dict[str, Any]:
    """Tell a row of a step that went as simulated, but for its last action."""
    plan = schedule(name, 4, 8)
    spans = simulate(with_messages(plan), Costs(0.002, 0.002, 0.002)).spans
    step = [
        Record(rank, each.step.kind, each.step.stage, each.step.microbatch, each.start_s, each.end_s)  # type: ignore[union-attr]
        for rank, row in enumerate(spans)
        for each in row
    ]
    last = max(range(len(step)), key=lambda index: step[index].end_s)
    late = step[last]
    step[last] = Record(late.rank, late.kind, late.stage, late.microbatch, late.start_s + late_s, late.end_s + late_s)
    row = pipe_bubble.row_of("gpu", plan, {"uncertainty_s": 1e-5}, [step])
    return {"say": "row", "row": {**row, "build_s": 1.0, "measure_s": 2.0, "loss": 11.0}}


def reached(said: list[dict[str, Any]]) -> bool:
    """Tell whether two cells of four GPUs are there and within reach."""
    return all(row["reached"] for row in gpu_bubble.judged(said, 2))


def test_every_cell_must_be_there_and_within_reach() -> None:
    good, bad = said("zb1p"), said("1f1b", late_s=0.01)
    failed = {"say": "failed", "why": "ranks ended with [0, 1, 0, 0] within 240 s"}
    assert reached([good, said("1f1b")])
    assert not reached([good, bad])
    assert not reached([good])
    assert gpu_bubble.judged([good], 2)[-1]["why"] == "1 of 2 cells were measured"
    assert not reached([good, good, failed])
    assert gpu_bubble.judged([good, good, failed], 2)[-1] == {**failed, "reached": False}


def test_a_row_is_told_with_what_its_actions_took(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_bubble.tell(said("1f1b")["row"])
    told = capsys.readouterr().out
    assert "gpu  4 ranks  1f1b  m 8" in told
    assert "F 2.00 2.00 2.00 2.00  I 4.00 4.00 4.00 4.00  W 0.00" in told
