"""Shared by the benchmarks: interleaved pairs A B B A, their median ratio, and the line of JSON that ends each script.

Absolute times on a shared machine drift; a ratio of neighbours in time does not.
"""

import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from typing import Any


def interleaved(
    ours: Callable[[], float], theirs: Callable[[], float], repeats: int
) -> tuple[list[float], list[float]]:
    """Measure both sides `repeats` times each, in the order A B B A, after one warm-up of each."""
    ours()
    theirs()
    mine, others = [], []
    for repeat in range(repeats):
        for side in (ours, theirs) if repeat % 2 == 0 else (theirs, ours):
            (mine if side is ours else others).append(side())
    return mine, others


def report(
    name: str, mine: Sequence[float], others: Sequence[float], *, reach: float, unit: str = "s", **more: Any
) -> bool:
    """Print medians, the median of the paired ratios with its spread, and one JSON line; say whether it is in reach."""
    ratios = [a / b for a, b in zip(mine, others, strict=True)]
    ratio = statistics.median(ratios)
    reached = ratio <= reach
    print(f"{name}")
    print(f"  ours    {statistics.median(mine):.4f} {unit}   (min {min(mine):.4f}, max {max(mine):.4f}, n {len(mine)})")
    print(f"  theirs  {statistics.median(others):.4f} {unit}   (min {min(others):.4f}, max {max(others):.4f})")
    print(
        f"  ratio   {ratio:.3f}   (pairs {min(ratios):.3f} .. {max(ratios):.3f}); "
        f"reach <= {reach}: {'yes' if reached else 'NO'}"
    )
    record = {
        "benchmark": name,
        "ratio": ratio,
        "reach": reach,
        "reached": reached,
        "ours": list(mine),
        "theirs": list(others),
    }
    print(json.dumps({**record, "unit": unit, "cores": os.cpu_count(), "python": platform.python_version(), **more}))
    return reached
