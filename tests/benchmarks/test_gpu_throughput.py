"""What `gpu_throughput.py` makes of what its ranks said: no GPU is needed for that."""

import gpu_throughput
import pytest
from gpu_pipes import worst_of
from gpu_rows import ROWS, Row, side

pytestmark = pytest.mark.command

SPECS = (
    side("slow ddp", "torch"),
    side("fast ddp", "torch"),
    side("ours", "engine", held=True),
    side("ours other", "engine"),
    side("ours alone", "engine", alone=True),
)
ROW = Row("gpt-small", (8,), SPECS, 1.04)


def result(**samples: list[float]) -> dict:
    said = [{"say": "ready", "units": 100}]
    said += [{"say": "sample", "side": name, "step_ms": time} for name, times in samples.items() for time in times]
    return {"row": "x", "batch": 8, "gpus": 2, "reach": 1.04, "problem": "", "said": said}


def test_ours_is_compared_with_the_fastest_of_theirs_turn_by_turn_and_with_one_gpu() -> None:
    found = gpu_throughput.summary(
        ROW, result(**{"slow ddp": [20.0, 20.0, 20.0], "fast ddp": [11.0, 12.0, 22.0], "ours": [10.0, 10.0, 20.0]})
    )
    assert found["ratios"] == pytest.approx({"slow ddp": 0.6, "fast ddp": 1.0, "ours": 1.1})
    assert found["reached"]
    assert found["scaling"] == {}
    found = gpu_throughput.summary(ROW, result(**{"fast ddp": [10.0], "ours": [10.0], "ours alone": [9.8]}))
    assert found["scaling"] == pytest.approx({"ours": 0.98})
    assert not found["reached"]


def test_a_side_that_is_not_held_reaches_nothing_and_a_missing_one_neither() -> None:
    other = gpu_throughput.summary(ROW, result(**{"fast ddp": [10.0], "ours other": [5.0]}))
    assert (other["ratios"]["ours other"], other["reached"]) == (2.0, False)
    assert not gpu_throughput.summary(ROW, result(ours=[5.0]))["reached"]
    assert not gpu_throughput.summary(ROW, result())["reached"]


def test_memory_is_held_to_torchs() -> None:
    row = Row("vgg11", (8,), (side("torch ddp", "torch"), side("bucketed", "bucketed", held=True)), 1.0, what="memory")
    for mine, reached in ((99, True), (100, True), (101, False)):
        said = [{"say": "memory", "side": "torch ddp", "peak_bytes": 100}]
        said += [{"say": "memory", "side": "bucketed", "peak_bytes": mine}]
        found = gpu_throughput.summary(row, {**result(), "said": said})
        assert (found["ratios"]["bucketed"], found["reached"]) == (mine / 100, reached)


def test_memory_is_compared_with_the_least_of_theirs_and_states_with_the_formula() -> None:
    specs = (side("fsdp", "torch fsdp"), side("other", "torch fsdp"), side("zero3", "zero3", held=True))
    said = [
        {"say": "memory", "side": name, "peak_bytes": peak, "formula_bytes": 100}
        for name, peak in (("fsdp", 120), ("other", 110), ("zero3", 104))
    ]
    for what, ratio in (("memory", 104 / 110), ("states", 1.04)):
        found = gpu_throughput.summary(Row("gpt-xl", (8,), specs, 1.05, what=what), {**result(), "said": said})
        assert (found["ratios"]["zero3"], found["reached"]) == (ratio, True)


def test_gradients_on_gpus_are_compared_parameter_by_parameter():
    assert worst_of({"a": 1.0, "b": 2.2, "tiny": 9.0}, {"a": 1.0, "b": 2.0, "tiny": 1e-9}) == pytest.approx(0.1)
    assert worst_of({"a": 1.0}, {"a": 1.0, "b": 1.0}) == float("inf")
    assert worst_of({"a": float("nan")}, {"a": 1.0}) == float("inf")


def test_every_row_holds_one_side_of_ours_and_has_one_of_theirs_and_claims_name_sides() -> None:
    for name, row in ROWS.items():
        names = [each["name"] for each in row.specs]
        (held,) = (each for each in row.specs if each.get("held"))
        theirs = [each for each in row.specs if each["kind"].startswith("torch")]
        assert any(each.get("alone") == held.get("alone") for each in theirs)  # alone: on one GPU
        assert len(set(names)) == len(names)
        assert all({ours, other} <= set(names) for ours, other, _ in row.claims)
        assert (row.microbatches > 0) == name.startswith("p-")
