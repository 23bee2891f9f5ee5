"""Find environment problems that the numbers show: few cores, other programs, a late rank, slow first calls."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from muster.collectives_bench.records import BenchCell, BenchHeader, Block, Result, WorldRecord
from muster.collectives_bench.results.rows import STEAL_LIMIT, SYMMETRIC, BenchRow
from muster.collectives_bench.sizes import size_text
from muster.jobs.basics.words import counted
from muster.jobs.measuring.compare import FOREIGN_LIMIT
from muster.jobs.measuring.stats import quantile

SMALL_BYTES: Final = 2**20
LOADED: Final = 0.30  # CPU use by other programs above this has made calls 1.24x slower (median)
FIRST_CALL_SHARE: Final = 3.0  # first calls slower than this multiple of the median are reported
LEAST_LATE_ROWS: Final = 2


@dataclass(frozen=True)
class Finding:
    """A problem, with its evidence, its cost and advice.

    `factor` is the ratio by which calls take longer. `seconds` is the cost, if it is paid once. `measured` is True if
    the cost was measured in this result. Otherwise the cost was seen elsewhere, and the text in `cost` says so.
    """

    what: str
    evidence: str
    cost: str
    advice: str
    factor: float | None = None
    seconds: float | None = None
    measured: bool = False

    @property
    def text(self) -> str:
        """The whole finding in one line."""
        return f"{self.what} ({self.evidence}): {self.cost}; {self.advice}"


def log_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(math.fsum(math.log(ratio) for ratio in ratios) / len(ratios))


def too_few_cores(result: Result, rows: Sequence[BenchRow]) -> Iterator[Finding]:
    """Report hosts with more ranks than cores. The cost is relative to a world in the same result with enough cores."""
    crowded = [(header, host) for header in result.headers for host in header.hosts if host.ranks > host.cores > 0]
    for world in dict.fromkeys(header.world for header, _ in crowded):
        host = next(host for header, host in crowded if header.world == world)
        fits = _fitting(result.headers, world)
        seen = next((each for each in (_cost_of_crowd(rows, fit, world) for fit in fits) if each), None)
        what = f"{host.ranks} ranks share {counted(host.cores, 'core')}"
        advice = "use fewer ranks per node, or more cores (cpus_per_task under Slurm)"
        if seen is None:
            yield Finding(
                what,
                f"on {host.host}",
                "small messages wait for a core. Seen elsewhere: all_reduce of 512 KB takes 4.3 ms with 4 ranks on "
                "2 cores, and 0.75 ms with 2 ranks",
                advice,
                factor=4.3 / 0.75,
            )
        else:
            cell, fitting_us, crowded_us = seen
            yield Finding(
                what,
                f"on {host.host}",
                f"{cell.operation} of {size_text(cell.asked_bytes)} takes {crowded_us / 1e3:.3g} ms, and "
                f"{fitting_us / 1e3:.3g} ms if every rank has a core: {crowded_us / fitting_us:.1f}x, measured here "
                "(more ranks also mean more messages)",
                advice,
                factor=crowded_us / fitting_us,
                measured=True,
            )


def _fitting(headers: Sequence[BenchHeader], crowded: WorldRecord) -> list[WorldRecord]:
    """List the worlds that are like `crowded`, but in which every rank has a core, largest first."""
    alike = {
        header.world
        for header in headers
        if (header.world.nodes, header.world.backend, header.world.device)
        == (crowded.nodes, crowded.backend, crowded.device)
        and header.world.ranks > 1
        and all(host.ranks <= host.cores for host in header.hosts)
    }
    return sorted(alike, key=lambda world: -world.ranks)


def _cost_of_crowd(
    rows: Sequence[BenchRow], fits: WorldRecord, crowded: WorldRecord
) -> tuple[BenchCell, float, float] | None:
    """Return the largest cell up to SMALL_BYTES that both worlds measured, preferably all_reduce, with both times."""
    times = {(row.world, row.cell): row.p50_us for row in rows if row.p50_us and row.nbytes <= SMALL_BYTES}
    both = [cell for world, cell in times if world == fits and (crowded, cell) in times]
    if not both:
        return None
    cell = max(both, key=lambda cell: (cell.operation == "all_reduce", cell.asked_bytes))
    return cell, times[fits, cell], times[crowded, cell]


def other_programs(result: Result, rows: Sequence[BenchRow]) -> Iterator[Finding]:
    """Report that other programs used the CPUs of the hosts. Blocks of one cell with and without them show the cost."""
    loaded = [block for block in result.blocks if block.load and block.load.foreign > FOREIGN_LIMIT]
    if not loaded:
        return
    shares = [block.load.foreign for block in loaded if block.load]
    hosts = sorted({block.load.host for block in loaded if block.load and block.load.host})
    ratios = _loaded_against_quiet(result.blocks)
    if ratios:
        cost = f"loaded blocks took {log_mean(ratios):.2f}x as long as quiet ones, measured here ({len(ratios)} rows)"
    else:
        cost = "seen elsewhere, when they used more than 30 %: 1.24x (median), up to 2x; not measured here"
    yield Finding(
        "other programs used the CPUs",
        f"{len(loaded)} of {counted(len(result.blocks), 'block')}, up to {max(shares):.0%} of a host's time"
        + (f", on {', '.join(hosts[:3])}" if hosts else ""),
        cost,
        "measure when no other programs run (top shows them); affected rows are flagged",
        factor=log_mean(ratios) if ratios else None,
        measured=bool(ratios),
    )


def _loaded_against_quiet(blocks: Sequence[Block]) -> list[float]:
    """Return the ratio of times in loaded and quiet launches, for each cell that has both."""
    times: dict[tuple[WorldRecord, BenchCell], tuple[list[float], list[float]]] = {}
    for block in blocks:
        if block.load is None or block.latency is None or block.latency.p50_us <= 0:
            continue
        quiet, loaded = times.setdefault((block.world, block.cell), ([], []))
        if block.load.foreign <= FOREIGN_LIMIT:
            quiet.append(block.latency.p50_us)
        elif block.load.foreign > LOADED:
            loaded.append(block.latency.p50_us)
    return [median(loaded) / median(quiet) for quiet, loaded in times.values() if quiet and loaded]


def steal(result: Result, rows: Sequence[BenchRow]) -> Iterator[Finding]:
    """Report steal: time in which the physical machine ran other virtual machines on this machine's cores."""
    stolen = [block for block in result.blocks if block.load and block.load.steal > STEAL_LIMIT]
    if stolen:
        most = max(block.load.steal for block in stolen if block.load)
        yield Finding(
            "the physical machine gave its cores to other virtual machines (steal)",
            f"{len(stolen)} of {counted(len(result.blocks), 'block')}, up to {most:.0%}",
            f"up to {1 / (1 - min(most, 0.99)):.2f}x, calculated from the share",
            "use a dedicated machine, or measure at another time",
            factor=1 / (1 - min(most, 0.99)),
        )


def late_rank(result: Result, rows: Sequence[BenchRow]) -> Iterator[Finding]:
    """Report a rank for which the other ranks wait in most rows of a world."""
    for world in dict.fromkeys(row.world for row in rows):
        able = [row for row in rows if row.world == world and row.is_measured and row.cell.operation in SYMMETRIC]
        for rank in sorted({row.late_rank for row in able if row.late_rank is not None}):
            named = [row for row in able if row.late_rank == rank]
            if len(named) < LEAST_LATE_ROWS or 2 * len(named) < len(able):
                continue
            factor = median([_cost_of_late(result.blocks, row) for row in named])
            yield Finding(
                f"rank {rank} is late{_where(result, world, rank)}",
                f"in {len(named)} of {len(able)} rows, it is last in every launch",
                f"it takes {factor:.2f}x as long as the second-slowest rank, measured here",
                "check for other processes on its host, its cores' clock rate and its link",
                factor=factor,
                measured=True,
            )


def _cost_of_late(blocks: Sequence[Block], row: BenchRow) -> float:
    """Return the ratio of the slowest rank's time to the second-slowest rank's."""
    ordered = [
        sorted(block.lateness)
        for block in blocks
        if (block.world, block.cell) == (row.world, row.cell) and block.lateness and len(block.lateness) > 1
    ]
    return median([shares[-1] / max(shares[-2], 1e-3) for shares in ordered])


def _where(result: Result, world: WorldRecord, rank: int) -> str:
    node = rank // max(world.ranks_per_node, 1)
    names = {
        host.host for header in result.headers if header.world == world for host in header.hosts if host.node == node
    }
    return f" (on {', '.join(sorted(names))})" if names else ""


def first_calls(result: Result, rows: Sequence[BenchRow]) -> Iterator[Finding]:
    """Report the cost of first calls if it is high: page faults, connections, TCP's slow start."""
    pairs = [(row.first_us, row.p50_us) for row in rows if row.first_us is not None and row.p50_us]
    if not pairs:
        return
    factors = [first / usual for first, usual in pairs]
    if quantile(factors, 0.9) < FIRST_CALL_SHARE:
        return
    seconds = math.fsum(max(first - usual, 0.0) for first, usual in pairs) / 1e6
    yield Finding(
        "first calls are slow",
        f"{median(factors):.1f}x the median of later ones, {quantile(factors, 0.9):.1f}x in a tenth of the rows, "
        f"{max(factors):.1f}x at most",
        f"{seconds:.3g} s for the first call of every row, measured here; the rows' times do not include it",
        "a job pays it once for each operation and size, so skip the first steps when you time a job",
        seconds=seconds,
        measured=True,
    )


SYMPTOMS: Final[tuple[Callable[[Result, Sequence[BenchRow]], Iterator[Finding]], ...]] = (
    too_few_cores,
    late_rank,
    other_programs,
    steal,
    first_calls,
)
