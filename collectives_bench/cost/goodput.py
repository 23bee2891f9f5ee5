"""Simulate a run with failing nodes, to predict its goodput: the share of time that goes into steps that count. Pure.

    step step step | save step step ✗ detect stop wait start load | step step ...
                     └─ lost: done again after the restart ┘

Failures of nodes are independent and exponential, so a run on n nodes fails with a rate of n / MTBF. A save stalls
training for `stall_s` and is committed after `save_s`, while training continues. After a failure the run restarts from
the newest committed save, with a spare node if one is left; otherwise it waits until a node is repaired.

The best interval between saves of Young (1974) is sqrt(2 stall MTBF); Daly (2006) adds terms of higher order. Both
ignore the time until a save is committed, which the simulation includes.
"""

import heapq
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

MONTH_S: Final = 30 * 86400.0
RUNS: Final = 200  # simulated, for a distribution
FEW_RUNS: Final = 40  # for each interval and number of spares that is tried
INTERVALS: Final = tuple(2.0 ** (power / 2) for power in range(-6, 7))  # multiples of Young's interval
KINDS: Final = ("useful", "stalls", "lost_steps", "detect", "stop", "wait", "start", "load")
ENOUGH_GAIN: Final = 0.001  # of the time: another spare node must win more

# Times of Muster itself. Where docs/measured.md has a row, its first words are quoted.
DETECT_S: Final = 5.0  # a silent node counts as lost (DESIGN.md, Leases)
STOP_S: Final = 0.15  # docs/failures.md, the attempts of a run
START_S: Final = 1.2  # "power loss of one of 4 nodes": 6.4 s to the first new step, less detect, stop and load
LOAD_S: Final = 0.05
COPY_BYTES_S: Final = 5.9e9  # "training stalls during a save of 200 MB": 34 ms
STORAGE_BYTES_S: Final = 1e9  # of a node, to shared storage: an assumption


@dataclass(frozen=True)
class Faults:
    """Failures and repairs: nodes that train, their mean time between failures, spares, and the time of a repair."""

    nodes: int
    node_mtbf_s: float
    spares: int = 0
    repair_s: float = 3600.0

    @property
    def mtbf_s(self) -> float:
        """The mean time between failures of the run."""
        return self.node_mtbf_s / self.nodes


@dataclass(frozen=True)
class RunTimes:
    """The times of a run: its steps, its saves, and the phases of a restart, in seconds."""

    step_s: float = 1.0
    stall_s: float = 0.034
    save_s: float = 1.0
    detect_s: float = DETECT_S
    stop_s: float = STOP_S
    start_s: float = START_S
    load_s: float = LOAD_S


@dataclass(frozen=True)
class Goodput:
    """The result of one or several simulated runs. `shares`: of the time, by kind; `useful` is the goodput."""

    shares: dict[str, float]
    failures: float
    useful: tuple[float, ...]  # the goodput of each run, in order

    def at(self, share: float) -> float:
        """Return a quantile of the goodput."""
        return self.useful[min(int(share * len(self.useful)), len(self.useful) - 1)]


def young_s(stall_s: float, mtbf_s: float) -> float:
    """Return Young's interval between saves."""
    return math.sqrt(2 * stall_s * mtbf_s)


def daly_s(stall_s: float, mtbf_s: float) -> float:
    """Return Daly's interval between saves, or the MTBF if a stall takes more than twice as long."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    root = math.sqrt(stall_s / (2 * mtbf_s))
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + root / 3 + root**2 / 9) - stall_s


def simulate(
    times: RunTimes, faults: Faults, interval_s: float, *, horizon_s: float = MONTH_S, runs: int = RUNS, seed: int = 0
) -> Goodput:
    """Simulate runs of `horizon_s` seconds that save every `interval_s` seconds of training."""
    every = [
        _one(times, faults, interval_s, horizon_s, _drawn(random.Random(f"{seed}/{run}"), faults.mtbf_s))
        for run in range(runs)
    ]
    return _goodput(every, horizon_s)


def replay(
    times: RunTimes, faults: Faults, interval_s: float, failures_s: Sequence[float], *, horizon_s: float
) -> Goodput:
    """Simulate a run of `horizon_s` seconds that fails at these times."""
    known = itertools.chain(sorted(failures_s), itertools.repeat(math.inf))
    return _goodput([_one(times, faults, interval_s, horizon_s, known)], horizon_s)


def _drawn(draw: random.Random, mtbf_s: float) -> Iterator[float]:
    """Yield the times of independent failures."""
    now = 0.0
    while True:
        now += draw.expovariate(1 / mtbf_s)
        yield now


def _goodput(every: Sequence[tuple[dict[str, float], int]], horizon_s: float) -> Goodput:
    shares = {kind: fmean(spent[kind] for spent, _ in every) / horizon_s for kind in KINDS}
    useful = sorted(spent["useful"] / horizon_s for spent, _ in every)
    return Goodput(shares, fmean(failures for _, failures in every), tuple(useful))


def _one(
    times: RunTimes, faults: Faults, interval_s: float, horizon_s: float, failures_s: Iterator[float]
) -> tuple[dict[str, float], int]:
    """Simulate one run that fails at these times; return the seconds of every kind, and the number of failures."""
    spent, failures, now = dict.fromkeys(KINDS, 0.0), 0, 0.0
    spares, repairs = faults.spares, list[float]()  # repairs: when broken nodes come back
    # A save is due at the first end of a step after the interval.
    steps = max(math.ceil(interval_s / times.step_s), 1)
    work_s = steps * times.step_s
    fails_s = next(failures_s)
    while True:
        _train(spent, times, work_s, min(fails_s, horizon_s) - now, fails=fails_s < horizon_s)
        now = fails_s
        if now >= horizon_s:
            return spent, failures
        while True:  # until a restart is not itself cut short by a failure
            failures += 1
            heapq.heappush(repairs, now + faults.repair_s)
            phases, spares = _restart(times, now, spares, repairs)
            lasts = sum(phases.values())
            fails_s = next(failures_s)
            left = min(fails_s - now, lasts, horizon_s - now)
            for kind, seconds in phases.items():
                took = min(seconds, left)
                spent[kind] += took
                left -= took
            now = min(fails_s, now + lasts)
            if now >= horizon_s:
                return spent, failures
            if fails_s > now:
                break


def _restart(times: RunTimes, now: float, spares: int, repairs: list[float]) -> tuple[dict[str, float], int]:
    """Return the phases of a restart at time `now`, and the number of spares that are left."""
    while repairs and repairs[0] <= now:
        heapq.heappop(repairs)
        spares += 1
    wait = 0.0
    if spares:
        spares -= 1
    else:
        wait = max(heapq.heappop(repairs) - now - times.detect_s - times.stop_s, 0.0)
    return {
        "detect": times.detect_s,
        "stop": times.stop_s,
        "wait": wait,
        "start": times.start_s,
        "load": times.load_s,
    }, spares


def _train(spent: dict[str, float], times: RunTimes, work_s: float, length: float, *, fails: bool) -> None:
    """Add a stretch of training. If it ends with a failure, the work since the last committed save is lost."""
    cycle_s = work_s + times.stall_s
    whole = int(length // cycle_s)
    rest = length - whole * cycle_s
    work = whole * work_s + min(rest, work_s)
    spent["stalls"] += length - work
    kept = work
    if fails:
        committed = whole  # saves that began; the newest ones may not be committed yet
        while committed and length < committed * cycle_s + times.save_s:
            committed -= 1
        kept = committed * work_s
    spent["useful"] += kept
    spent["lost_steps"] += work - kept


def best_interval(
    times: RunTimes, faults: Faults, *, horizon_s: float = MONTH_S
) -> tuple[float, list[tuple[float, float]]]:
    """Return the best interval between saves, and the mean goodput of every interval that was tried."""
    base_s = max(young_s(times.stall_s, faults.mtbf_s), times.step_s)
    tried = sorted({max(factor * base_s, times.step_s) for factor in INTERVALS})
    rows = [
        (interval_s, simulate(times, faults, interval_s, horizon_s=horizon_s, runs=FEW_RUNS).shares["useful"])
        for interval_s in tried
    ]
    return max(rows, key=lambda row: row[1])[0], rows


def best_spares(
    times: RunTimes, faults: Faults, interval_s: float, counts: Sequence[int], *, horizon_s: float = MONTH_S
) -> tuple[int, list[tuple[int, float]]]:
    """Return the number of spares beyond which more of them win less than 0.1 %, and the goodput of every number."""
    rows = []
    for count in counts:
        found = simulate(times, replace(faults, spares=count), interval_s, horizon_s=horizon_s, runs=FEW_RUNS)
        rows.append((count, found.shares["useful"]))
    most = max(share for _, share in rows)
    return next(count for count, share in rows if share >= most - ENOUGH_GAIN), rows
