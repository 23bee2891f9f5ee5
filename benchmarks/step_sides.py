"""Shared by the benchmarks of steps: sides that take turns in one process group, and how two of them compare.

A block is some steps of one side; it has two times, the CPU seconds of all ranks and the wall seconds of the slowest.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rank_processes import timed

CLOCKS = ("cpu", "wall")
Times = Sequence[tuple[float, float]]  # (CPU s, wall s) of a block, by repeat


def be_a_rank(measure: Callable[[], object]) -> None:
    """Call a measurement on one thread, in a group of all ranks; rank 0 prints what it returns."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = measure()
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def in_turns(blocks: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Time a block of every side, A B B A: a collective."""
    times: dict[str, list[tuple[float, float]]] = {side: [] for side in blocks}
    for repeat in range(repeats):
        for side in list(blocks)[:: 1 if repeat % 2 == 0 else -1]:
            times[side].append(timed(blocks[side]))
    return times


def apart(sides: Sequence[Any], norm: float = float("inf")) -> float:
    """Return how far tensors are from the first of them, as a share of it."""
    first, *others = sides
    return max(((other - first).norm(norm) / first.norm(norm)).item() for other in others)


def compared(ours: Times, theirs: Times) -> dict[str, dict[str, Any]]:
    """Return, by clock, the times of both, the ratio of each repeat, and the median of those."""
    found = {}
    for place, clock in enumerate(CLOCKS):
        mine, others = ([each[place] for each in times] for times in (ours, theirs))
        ratios = [one / other for one, other in zip(mine, others, strict=True)]
        found[clock] = {"ratio": statistics.median(ratios), "ratios": ratios, "ours": mine, "theirs": others}
    return found


def told(row: Mapping[str, Any], steps: int) -> str:
    """Write the two columns of a row that `compared` is part of: times of one step, ours and theirs, and the ratio."""
    texts = []
    for clock in CLOCKS:
        mine, theirs = (1e3 * statistics.median(row[clock][side]) / steps for side in ("ours", "theirs"))
        texts.append(f"{mine:7.0f} / {theirs:5.0f} ms  {row[clock]['ratio']:6.3f}")
    return f"{texts[0]:>28} {texts[1]:>28}"
