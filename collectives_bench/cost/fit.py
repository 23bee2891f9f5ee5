"""Fit the profile of a cluster to results: a curve for each operation and world, and the constants that they share."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from muster.collectives_bench.catalog import OPERATIONS
from muster.collectives_bench.cost.curves import LEAST_SIZES, CostLine, Curve, Key, Kind, line_of, short
from muster.collectives_bench.cost.heldout import (
    Samples,
    choose,
    errors_of,
    intervals,
    medians,
    residuals,
    sizes_left_out,
)
from muster.collectives_bench.cost.profile import Profile
from muster.collectives_bench.cost.worlds import Known, Shared, cores_of, hosts_of
from muster.collectives_bench.records import Result
from muster.collectives_bench.results.rows import BenchRow, rows_of
from muster.jobs.basics.errors import RefusedError

QUIET: Final = 0.10  # share of the CPUs used by other programs; if enough launches have less, only those are used
LEAST_QUIET: Final = 3  # launches
LARGE: Final = 1 << 18  # bytes, from which the costs of a byte exceed those of a call


@dataclass(frozen=True)
class FitSeries:
    """The measured times of one key: sizes, with one time per launch."""

    key: Key
    samples: Samples

    @property
    def is_enough(self) -> bool:
        """True if a curve can be fitted."""
        return len(self.samples) >= (LEAST_SIZES if OPERATIONS[self.key.operation].has_size else 1)


def fit(result: Result, *, name: str = "cluster", seed: int = 0) -> Profile:
    """Fit all curves and constants for which the result has enough measurements.

    Raises:
        RefusedError: if every measurement failed, or no operation has enough sizes.
    """
    rows = rows_of(result)
    found = series_of(rows)
    if not found:
        raise RefusedError("fit: every measurement failed; muster bench show prints the reasons")
    enough = [each for each in found if each.is_enough]
    if not enough:
        most = max(len(each.samples) for each in found)
        raise RefusedError(
            f"fit: an operation needs at least {LEAST_SIZES} sizes, but at most {most} were measured; "
            "measure more with --sizes 64K:64M"
        )
    known = curves_of(enough, seed)
    constants, worlds = Shared(known, hosts_of(result.headers), cores_of(result.headers)).fitted()
    return Profile(
        name=name,
        made_of=_made_of(result),
        curves=[each.curve for each in known],
        constants=constants,
        cpu_s_per_byte=short(cpu_s_per_byte(rows)),
        held_out_sizes=errors_of([pair for each in known if not each.curve.back_to_back for pair in each.left_out]),
        held_out_worlds=errors_of(worlds),
    )


def series_of(rows: Iterable[BenchRow]) -> list[FitSeries]:
    """Collect correctly measured rows into series by size.

    Requested sizes that were rounded to the same size are merged.
    """
    found: dict[Key, dict[int, list[float]]] = {}
    for row in rows:
        if row.state != "ok" or not row.p50_us or row.world.ranks < 2:
            continue
        world, cell = row.world, row.cell
        of_world = world.model_dump(exclude={"ranks_per_node"})
        key = Key(operation=cell.operation, dtype=cell.dtype, place=cell.place, call=cell.call, **of_world)
        found.setdefault(key, {}).setdefault(row.nbytes, []).extend(launches_of(row))
        if row.throughput_us:
            behind = key.model_copy(update={"back_to_back": True})
            found.setdefault(behind, {}).setdefault(row.nbytes, []).append(row.throughput_us / 1e6)
    return [FitSeries(key, tuple(sorted((s, tuple(t)) for s, t in sizes.items()))) for key, sizes in found.items()]


def cpu_s_per_byte(rows: Iterable[BenchRow]) -> float:
    """Return the CPU seconds of ranks and interrupts for a byte between nodes: the median of large all-reduces."""
    found = [
        row.cores * row.throughput_us / 1e6 / (OPERATIONS[row.cell.operation].wire(row.world.ranks) * row.nbytes)
        for row in rows
        if row.cores and row.throughput_us and row.cell.operation == "all_reduce" and row.nbytes >= LARGE
        if row.world.nodes > 1 and row.world.device == "cpu"
    ]
    return median(found) if found else 0.0


def launches_of(row: BenchRow) -> list[float]:
    """Return the medians of a row's launches in seconds. If enough launches are quiet, only those are used."""
    quiet = [
        took
        for took, foreign in zip(row.launch_medians_us, row.launch_foreign, strict=True)
        if foreign is None or foreign <= QUIET
    ]
    return [took / 1e6 for took in (quiet if len(quiet) >= LEAST_QUIET else row.launch_medians_us) if took > 0]


def curves_of(found: Sequence[FitSeries], seed: int) -> list[Known]:
    """Fit a curve to each series."""
    kinds = [choose(medians(each.samples)) for each in found]
    wide = intervals([residuals(each.samples, kind, seed) for each, kind in zip(found, kinds, strict=True)])
    return [_known(*each) for each in zip(found, kinds, wide, strict=True)]


def _known(series: FitSeries, kind: Kind, wide: float) -> Known:
    measured = medians(series.samples)
    line, left_out = line_of(measured), sizes_left_out(measured)
    curve = Curve(
        **series.key.model_dump(),
        kind=kind,
        line=CostLine(alpha_s=short(line.alpha_s), beta_s=short(line.beta_s)),
        points=[(size, short(took)) for size, took in measured],
        low=short(1 / wide),
        high=short(wide),
        held_out=None if series.key.back_to_back else errors_of(left_out),
    )
    return Known(curve, measured, left_out)


def _made_of(result: Result) -> str:
    names = sorted({header.name for header in result.headers})
    hosts = sorted({facts.host for header in result.headers for facts in header.hosts})
    day = time.strftime("%Y-%m-%d", time.gmtime(median(block.time for block in result.blocks)))
    torch = sorted({header.torch for header in result.headers})
    parts = [", ".join(names), f"on {', '.join(hosts)}" if hosts else "", day, f"torch {', '.join(torch)}"]
    return "; ".join(part for part in parts if part and part != "torch ")
