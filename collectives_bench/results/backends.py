"""A table that shows the same cells on several backends side by side.

# 1 node x 2 ranks              gloo on cpu              nccl on cuda          nccl / gloo
# cell                       time (us)    busbw      time (us)     busbw        time
# all_reduce 1 MB fp32 in        812.4     1.29           31.0     33.83        0.04
"""

from collections.abc import Sequence
from typing import Final

from muster.collectives_bench.results.rows import BenchRow
from muster.collectives_bench.results.table import number
from muster.jobs.basics.words import counted

WIDTH: Final = 12


def lines(rows: Sequence[BenchRow]) -> list[str]:
    """Return a table for each number of nodes and ranks; empty if only one backend was measured."""
    found: dict[tuple[int, int], dict[str, dict[str, BenchRow]]] = {}
    for row in rows:
        of_world = found.setdefault((row.world.nodes, row.world.ranks_per_node), {})
        of_world.setdefault(row.cell.text(), {})[f"{row.world.backend} on {row.world.device}"] = row
    names = list(dict.fromkeys(name for world in found.values() for cell in world.values() for name in cell))
    if len(names) < 2:
        return []
    lines = []
    for (nodes, ranks), cells in found.items():
        where = f"# {counted(nodes, 'node')} x {counted(ranks, 'rank')}"
        left = max(map(len, [where, *(f"# {cell}" for cell in cells)]))
        ratios = [f"{name.split()[0]} / {names[0].split()[0]}" for name in names[1:]]
        lines += ["#", where.ljust(left) + "".join(f" {name:>{2 * WIDTH - 1}}" for name in names) + _cells(ratios)]
        lines.append("# cell".ljust(left) + _cells(["time (us)", "busbw"] * len(names) + ["time"] * len(ratios)))
        lines += [f"# {cell}".ljust(left) + _cells(_values(of_cell, names)) for cell, of_cell in cells.items()]
    return lines


def _cells(values: Sequence[str]) -> str:
    return "".join(value.rjust(WIDTH) for value in values)


def _values(of_cell: dict[str, BenchRow], names: Sequence[str]) -> list[str]:
    """Return the time and busbw of every backend, then the ratio of each time to the first backend's."""
    found = [of_cell.get(name) for name in names]
    times = [row.p50_us if row else None for row in found]
    both = [
        text
        for time, row in zip(times, found, strict=True)
        for text in (number(time), number(row.busbw if row else None))
    ]
    first = times[0]
    return both + [number(time / first if time and first else None) for time in times[1:]]
