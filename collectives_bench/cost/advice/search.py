"""Choose among all plans: the fastest that fits in memory, the runner-up, and what would change the answer. Pure.

The search is exact: a plan is left out only if a lower bound on its step time is above the third best kind of split
that can be chosen.
A kind is a split without its number of micro-batches and its bucket size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import hypot
from typing import Any, Final

from muster.collectives_bench.cost.advice.plans import SplitLimits, SplitPlan, every_plan
from muster.collectives_bench.cost.advice.site import JobSite
from muster.collectives_bench.cost.advice.steptime import (
    StepParts,
    kind_of,
    least_s,
    measured_error,
    memory,
    price,
)
from muster.collectives_bench.cost.buckets import SWEEP
from muster.collectives_bench.cost.exposed import Network
from muster.collectives_bench.cost.memory import PeakMemory
from muster.collectives_bench.cost.steps import USABLE, PredictedTime
from muster.jobs.basics.errors import RefusedError

SHOWN: Final = 12
WITH_BUCKETS: Final = ("bucketed", "zero1", "zero2")
NETWORKS: Final = (2.0, 4.0, 10.0)
BATCHES: Final = (2, 4)
SEARCHED: Final = ("zb1p", "zbv")  # schedules that are found by a search, which takes long
EXACT: Final = 3  # so many kinds of splits are certainly the best ones
MOST_DOUBT: Final = 0.3  # of computing times
NO_DIFFERENCE: Final = 0.02  # of the step: smaller gains do not justify another bucket size


@dataclass(frozen=True)
class Advised:
    """A plan with its predicted step. `why_not`: why it cannot be chosen; empty if it can."""

    plan: SplitPlan
    parts: StepParts | None
    step: PredictedTime | None
    memory: PeakMemory | None
    why_not: str = ""


@dataclass(frozen=True)
class SplitAdvice:
    """The plans in order of predicted time, those that cannot be chosen last. `considered`: how many were compared."""

    rows: tuple[Advised, ...]
    considered: int

    @property
    def best(self) -> Advised | None:
        """The fastest plan that can be chosen."""
        return next((row for row in self.rows if not row.why_not), None)

    @property
    def runner_up(self) -> Advised | None:
        """The next plan that is split in another way: not only another number of micro-batches or bucket size."""
        best = self.best
        others = (row for row in self.rows if best and not row.why_not and _kind_of(row.plan) != _kind_of(best.plan))
        return next(others, None)

    @property
    def margin(self) -> float:
        """The share by which the runner-up is slower."""
        if self.best is None or self.runner_up is None:
            return 0.0
        assert self.best.step is not None
        assert self.runner_up.step is not None
        return self.runner_up.step.seconds / self.best.step.seconds - 1

    @property
    def is_clear(self) -> bool:
        """True if the intervals of best and runner-up do not overlap."""
        if self.best is None or self.runner_up is None:
            return True
        assert self.best.step is not None
        assert self.runner_up.step is not None
        return not self.best.step.overlaps(self.runner_up.step)


Check = Callable[[SplitPlan], str]  # why the job's other settings do not allow a plan; "" if they do


def advise(
    site: JobSite, limits: SplitLimits, *, check: Check, memory_limit: float | None = None, shown: int = SHOWN
) -> SplitAdvice:
    """Compare all plans; return the fastest ones with intervals, and the best plan of each mode."""
    plans = list(every_plan(limits))
    priced, refused = list[tuple[float, SplitPlan, StepParts]](), dict[object, Advised]()
    alike = dict[SplitPlan, StepParts]()  # zero1 and zero2 take the same time
    best_s, kinds = float("inf"), dict[object, float]()
    # Modes and schedules that are simulated fast come first, so that few of the others are left.
    order = sorted(
        ((not plan.is_mode, plan.schedule in SEARCHED, least_s(plan, site), plan) for plan in plans),
        key=lambda each: each[:3],
    )
    for *_, bound_s, plan in order:
        if bound_s > best_s and not (plan.is_mode and not plan.schedule):
            continue
        try:
            same = replace(plan, averaging="zero1") if plan.averaging == "zero2" else plan
            parts = alike[same] = alike.get(same) or price(same, site)
        except RefusedError as error:
            refused[_kind_of(plan)] = Advised(plan, None, None, None, str(error))
            continue
        priced.append((parts.seconds, plan, parts))
        if parts.seconds >= best_s or obstacle(plan, site, check, memory_limit)[1]:
            continue
        kinds[_kind_of(plan)] = min(parts.seconds, kinds.get(_kind_of(plan), parts.seconds))
        best_s = sorted(kinds.values())[EXACT - 1] if len(kinds) >= EXACT else float("inf")
    priced.sort(key=lambda each: (each[0], not each[1].is_mode, each[1].text))
    return SplitAdvice((*_chosen(priced, site, check, memory_limit, shown), *refused.values()), len(plans))


def _chosen(
    priced: Sequence[tuple[float, SplitPlan, StepParts]],
    site: JobSite,
    check: Check,
    memory_limit: float | None,
    shown: int,
) -> list[Advised]:
    """Return the fastest plan of every kind, the first ones with intervals; then the rest of the modes."""
    rows, kinds = list[Advised](), dict[object, int]()
    for _, plan, parts in priced:
        kind = _kind_of(plan)
        if kinds.get(kind, 0) or (len(rows) >= shown and not plan.is_mode):
            continue
        row = judged(plan, parts, site, check, memory_limit)
        if row.why_not and plan.schedule:
            continue  # another number of micro-batches may fit
        kinds[kind] = 1
        if len(rows) < shown or plan.is_mode:
            rows.append(row)
    return sorted(rows, key=lambda row: bool(row.why_not))


def judged(plan: SplitPlan, parts: StepParts, site: JobSite, check: Check, memory_limit: float | None) -> Advised:
    """Add the interval and the memory to a priced plan, and why it cannot be chosen."""
    needed, why = obstacle(plan, site, check, memory_limit)
    return Advised(plan, parts, interval(plan, parts, site), needed, why)


def obstacle(plan: SplitPlan, site: JobSite, check: Check, memory_limit: float | None) -> tuple[PeakMemory | None, str]:
    """Return the memory that a plan needs, and why it cannot be chosen; "" if it can."""
    needed = memory(plan, site)
    why = check(plan)
    if needed is None:
        why = why or "the model cannot be split this way"
    elif memory_limit is not None and needed.total > USABLE * memory_limit:
        why = why or "does not fit into nine tenths of the memory"
    return needed, why


def interval(plan: SplitPlan, parts: StepParts, site: JobSite) -> PredictedTime:
    """Return a step's interval: that of the network's times, and the errors of measured passes and pipelines."""
    low, high = price(plan, site, "low_s").seconds, price(plan, site, "high_s").seconds
    kind = kind_of(plan)
    error = site.kept(("error", kind), lambda: measured_error(site, kind))
    doubt = min(hypot(site.times.spread, error), MOST_DOUBT) * (parts.computation + parts.bubble + parts.update)
    return PredictedTime(max(min(low, parts.seconds) - doubt, 0.0), parts.seconds, max(high, parts.seconds) + doubt)


def best_bucket(row: Advised, site: JobSite, sizes: Sequence[int] = SWEEP) -> tuple[Advised, list[tuple[int, float]]]:
    """Return the plan with its best bucket size, and the predicted step of every size. Unchanged without buckets."""
    if row.plan.averaging not in WITH_BUCKETS or row.parts is None:
        return row, []
    tried = [replace(row.plan, bucket_bytes=size) for size in sizes]
    steps = [(size, price(plan, site).seconds) for size, plan in zip(sizes, tried, strict=True)]
    size, seconds = min(steps, key=lambda each: each[1])
    if seconds > (1 - NO_DIFFERENCE) * row.parts.seconds:
        return row, steps
    plan = replace(row.plan, bucket_bytes=size)
    parts = price(plan, site)
    return Advised(plan, parts, interval(plan, parts, site), memory(plan, site), row.why_not), steps


class Faster:
    """A network whose exchanges take a fraction of the time."""

    def __init__(self, network: Network, factor: float) -> None:
        self.network, self.factor = network, factor

    def predict(self, *args: Any, **more: Any) -> Any:
        """Predict an exchange."""
        found = self.network.predict(*args, **more)
        shorter = {key: getattr(found, key) / self.factor for key in ("seconds", "low_s", "high_s")}
        return replace(found, **shorter)


def changes(
    site: JobSite, limits: SplitLimits, best: SplitPlan, check: Check, memory_limit: float | None
) -> list[dict[str, Any]]:
    """Return what would change the answer: a faster network, or a bigger batch, with the plan that is then best."""
    tries: list[tuple[str, JobSite, SplitLimits]] = [
        (f"a network {factor:g} times as fast", replace(site, network=Faster(site.network, factor)), limits)
        for factor in NETWORKS
    ]
    tries += [
        (
            f"a batch of {site.load.batch * factor}",
            replace(site, load=replace(site.load, batch=site.load.batch * factor)),
            replace(limits, batch=limits.batch * factor),
        )
        for factor in BATCHES
    ]
    found, kinds = list[dict[str, Any]](), set[str]()
    for what, there, bounds in tries:
        kind = what.split()[1]
        then = None if kind in kinds else advise(there, bounds, check=check, memory_limit=memory_limit, shown=1).best
        if then is not None and _kind_of(then.plan) != _kind_of(best):
            kinds.add(kind)
            assert then.step is not None
            found.append({"if": what, "best": then.plan.text, "step_s": then.step.seconds})
    return found


def _kind_of(plan: SplitPlan) -> object:
    return plan.data, plan.pipe, plan.tensor, plan.averaging, plan.schedule
