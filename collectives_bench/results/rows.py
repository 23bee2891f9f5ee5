"""Combine blocks into rows. A row is one cell in one world over all launches (`jobs/measuring/launches.py`). Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

from muster.collectives_bench.catalog import DTYPES, OPERATIONS
from muster.collectives_bench.records import BenchCell, Block, Result, SampleTimes, State, WireBytes, WorldRecord
from muster.jobs.measuring.compare import FOREIGN_LIMIT
from muster.jobs.measuring.launches import LaunchTimes, MeasuredRow, over_launches
from muster.jobs.measuring.stats import quantile, spread

STEAL_LIMIT: Final = 0.02
SPREAD_LIMIT: Final = 0.30  # limit of (slowest - fastest launch) / median; twice the usual value on a shared machine
FIRST_CALL_LIMIT: Final = 5.0  # limit for first calls, in multiples of the median; on a loopback, 90 % were faster
LATE_MARGIN: Final = 0.10  # least lag of the last rank behind the second-to-last rank, as a share of the call's time
LATE_CHANCE: Final = 0.07  # acceptable probability that one of several equally fast ranks is last in every launch

# The states from best to worst. A wrong result is worse than a failure, because it can stay unnoticed.
STATES: Final[tuple[State, ...]] = ("ok", "unsupported", "refused", "timeout", "failed", "wrong")

# Operations in which all ranks do the same work. In other operations, some rank is last because of its role.
SYMMETRIC: Final = frozenset(
    name
    for name in OPERATIONS
    if name not in ("broadcast", "reduce", "gather", "scatter", "ping_pong", "gather_scatter")
    and not name.startswith("tree_")
)


@dataclass(frozen=True)
class BenchRow(MeasuredRow):
    """The row of one cell in one world, over all launches. Times are in microseconds, algbw and busbw in GB/s.

    If one of five launches failed, the row shows the numbers of the other four, and the failure.
    """

    world: WorldRecord
    cell: BenchCell
    nbytes: int
    tried: int = 0  # number of launches, measured or not
    min_us: float | None = None
    p95_us: float | None = None  # p95 and p99: the median over launches of a launch's percentile
    p99_us: float | None = None
    max_us: float | None = None
    cv: float | None = None  # median over launches of the calls' coefficient of variation
    first_us: float | None = None
    throughput_us: float | None = None
    cores: float | None = None
    host_us: float | None = None
    wrong: int | None = None  # number of wrong elements, over all launches
    algbw: float | None = None
    busbw: float | None = None
    late_rank: int | None = None
    buffers_bytes: int | None = None
    hidden_bytes: int | None = None
    wire: WireBytes | None = None
    foreign: float | None = None  # median over launches of the load share on the busiest host
    flags: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[WorldRecord, BenchCell]:
        """The key of the row, equal in two results that measured the same cell in the same world."""
        return self.world, self.cell

    @property
    def labels(self) -> dict[str, Any]:
        """The world, the cell and the actual size."""
        return {"world": self.world.model_dump(), "cell": self.cell.model_dump(), "nbytes": self.nbytes}

    def named(self, *, in_full: bool) -> str:
        """Return a name such as `all_reduce 1 MB fp32 in`. `in_full` adds `2 nodes x 1 rank, gloo on cpu`."""
        cell = self.cell.text(self.nbytes)
        return f"{cell}, {self.world.text}" if in_full else cell

    def unlike(self, other: MeasuredRow) -> str:
        """Return both sizes as text if they differ, else ""."""
        assert isinstance(other, BenchRow)
        return "" if self.nbytes == other.nbytes else f"{self.nbytes} bytes before, {other.nbytes} after"


def rows_of(result: Result) -> list[BenchRow]:
    """Return one row for each cell of each world, in the order of the catalog."""
    found: dict[tuple[WorldRecord, BenchCell], list[Block]] = {}
    for block in result.blocks:
        found.setdefault((block.world, block.cell), []).append(block)
    rows = [_row(sorted(blocks, key=lambda block: block.time)) for blocks in found.values()]
    return sorted(rows, key=_place_in_table)


def _place_in_table(row: BenchRow) -> tuple[object, ...]:
    world, cell = row.world, row.cell
    of_world = (world.nodes, world.ranks_per_node, world.ranks, world.backend, world.device)
    of_cell = (list(OPERATIONS).index(cell.operation), list(DTYPES).index(cell.dtype), cell.call != "sync", cell.place)
    return *of_world, *of_cell, cell.asked_bytes


def _row(blocks: Sequence[Block]) -> BenchRow:
    state, reason = _worst(blocks)
    first = blocks[0]
    wrong = _wrong(blocks)
    row = BenchRow(first.world, first.cell, first.nbytes, state=state, reason=reason, tried=len(blocks), wrong=wrong)
    measured = [block for block in blocks if block.state == "ok" and block.latency is not None]
    # If all results are wrong, their times are still shown.
    measured = measured or [block for block in blocks if block.state == "wrong" and block.latency is not None]
    return _with_numbers(row, measured) if measured else row


def _worst(blocks: Sequence[Block]) -> tuple[State, str]:
    """Return the worst state and its earliest reason.

    If only some launches had this state, the reason says how many.
    """
    state = max((block.state for block in blocks), key=STATES.index)
    if state == "ok":
        return state, ""
    alike = [block for block in blocks if block.state == state]
    reason = next((block.reason for block in alike if block.reason), "")
    if len(alike) < len(blocks):
        reason = f"{reason} ({len(alike)} of {len(blocks)} launches)".strip()
    return state, reason


def _wrong(blocks: Sequence[Block]) -> int | None:
    checked = [block.wrong for block in blocks if block.wrong is not None]
    return sum(checked) if checked else None


def _with_numbers(row: BenchRow, blocks: Sequence[Block]) -> BenchRow:
    """Fill in the measured numbers. `blocks` must be in order of time."""
    timings = [block.latency for block in blocks if block.latency is not None]
    measured = over_launches([_launch(block, timing) for block, timing in zip(blocks, timings, strict=True)])
    p50_us = measured["p50_us"]
    cvs = [spread(block.samples_us) for block in blocks if len(block.samples_us) > 1]
    # Bytes per microsecond / 1000 is GB/s.
    algbw = row.nbytes / p50_us / 1e3 if row.nbytes and p50_us > 0 else None
    factor = OPERATIONS[row.cell.operation].bus_factor(row.world.ranks)
    memories = [block.memory for block in blocks if block.memory is not None]
    hidden = [memory.hidden_bytes for memory in memories if memory.hidden_bytes is not None]
    foreign = [block.load.foreign for block in blocks if block.load is not None]
    first_us = _middle(blocks, lambda block: block.first_us)
    late_rank = _late_rank(blocks)
    return replace(
        row,
        **measured,
        min_us=min(timing.min_us for timing in timings),
        p95_us=median([timing.p95_us for timing in timings]),
        p99_us=median([timing.p99_us for timing in timings]),
        max_us=max(timing.max_us for timing in timings),
        cv=median(cvs) if cvs else None,
        first_us=first_us,
        throughput_us=_middle(blocks, lambda block: block.throughput_us),
        cores=_middle(blocks, lambda block: block.cores),
        host_us=_middle(blocks, lambda block: block.host_us),
        algbw=algbw,
        busbw=None if algbw is None else algbw * factor,
        late_rank=late_rank,
        buffers_bytes=max((memory.buffers_bytes for memory in memories), default=None),
        hidden_bytes=max(hidden, default=None),
        wire=_wire(blocks),
        foreign=median(foreign) if foreign else None,
        flags=(*_flags_of_load(blocks), *_flags_of_times(measured["launch_medians_us"], first_us, late_rank)),
    )


def _launch(block: Block, timing: SampleTimes) -> LaunchTimes:
    quartile_us = quantile(block.samples_us, 0.25) if block.samples_us else None
    foreign = block.load.foreign if block.load else None
    return LaunchTimes(timing.n, timing.p50_us, timing.low_us, timing.high_us, block.time, quartile_us, foreign)


def _middle(blocks: Iterable[Block], value: Callable[[Block], float | None]) -> float | None:
    found = [each for each in map(value, blocks) if each is not None]
    return median(found) if found else None


def _wire(blocks: Sequence[Block]) -> WireBytes | None:
    """Return the counted bytes of the median launch (the lower of two).

    The number of bytes hardly differs between launches.
    """
    found = sorted((block.wire for block in blocks if block.wire is not None), key=lambda wire: wire.sent_bytes)
    return found[(len(found) - 1) // 2] if found else None


def _late_rank(blocks: Sequence[Block]) -> int | None:
    """Return the rank that is last in every launch, by a margin, if all ranks do the same work; else None.

    If n ranks are equally fast, the probability that one rank is last in all L launches is n^(1 - L).
    """
    found = [block.lateness for block in blocks if block.lateness and len(block.lateness) == block.world.ranks > 1]
    if not found or blocks[0].cell.operation not in SYMMETRIC:
        return None
    ranks = len(found[0])
    latest = {max(range(ranks), key=shares.__getitem__) for shares in found}
    if len(latest) > 1 or ranks ** (1 - len(found)) > LATE_CHANCE:
        return None
    margins = [ordered[-1] - ordered[-2] for ordered in map(sorted, found)]
    return latest.pop() if median(margins) >= LATE_MARGIN else None


def _flags_of_load(blocks: Sequence[Block]) -> tuple[str, ...]:
    flags = []
    for what, of, limit, shares in (
        (
            "other programs used up to",
            "of the CPUs",
            FOREIGN_LIMIT,
            [block.load.foreign for block in blocks if block.load],
        ),
        ("steal", "", STEAL_LIMIT, [block.load.steal for block in blocks if block.load]),
    ):
        if above := [share for share in shares if share > limit]:
            share = f"{what} {max(above):.0%} {of}".rstrip()
            flags.append(f"{share} ({len(above)} of {len(shares)} launches)")
    return tuple(flags)


def _flags_of_times(medians_us: Sequence[float], first_us: float | None, late_rank: int | None) -> tuple[str, ...]:
    flags, middle = [], median(medians_us)
    if len(medians_us) == 1:
        flags.append("one launch")
    elif middle > 0 and (apart := (max(medians_us) - min(medians_us)) / middle) > SPREAD_LIMIT:
        flags.append(f"launches disagree by {apart:.0%}")
    if first_us is not None and middle > 0 and first_us > FIRST_CALL_LIMIT * middle:
        flags.append(f"first call {first_us / middle:.3g}x")
    if late_rank is not None:
        flags.append(f"rank {late_rank} is late")
    return tuple(flags)
