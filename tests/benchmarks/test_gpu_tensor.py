"""What `gpu_tensor.py` makes of what its ranks said: no GPU is needed for that."""

import gpu_tensor
import pytest

pytestmark = pytest.mark.command


def said(**samples: list[float]) -> list[dict]:
    rows = [{"say": "sample", "side": name, "step_ms": time} for name, times in samples.items() for time in times]
    return [
        {"say": "ready", "tokens": 100},
        {"say": "built", "side": "ours", "peak_bytes": 2**30, "found": [1.0]},
        *rows,
    ]


def test_ours_is_compared_with_the_fastest_of_theirs_turn_by_turn() -> None:
    found = gpu_tensor.summary(
        said(**{"torch each": [30.0, 30.0], "torch": [20.0, 26.0], "ours": [10.0, 20.0], "ours batch": [40.0, 40.0]}), 2
    )
    assert found["ratios"] == pytest.approx({"torch each": 23 / 30, "torch": 1.0, "ours": 1.65, "ours batch": 0.575})
    assert found["reached"]
    assert found["peaks_gib"] == {"ours": 1.0}


def test_too_slow_or_failed_or_missing_reaches_nothing() -> None:
    assert not gpu_tensor.summary(said(torch=[12.0], ours=[10.0]), 2)["reached"]
    fast = said(torch=[20.0], ours=[10.0])
    assert gpu_tensor.summary(fast, 2)["reached"]
    assert not gpu_tensor.summary([*fast, {"say": "failed", "why": "no memory"}], 2)["reached"]
    other = {"say": "built", "side": "torch", "peak_bytes": 0, "found": [1.03]}
    assert not gpu_tensor.summary([*fast, other], 2)["reached"]
    assert gpu_tensor.summary([*fast, {**other, "found": [1.01]}], 2)["reached"]
    assert not gpu_tensor.summary(said(ours=[10.0]), 2)["reached"]
    assert not gpu_tensor.summary([], 2)["reached"]
