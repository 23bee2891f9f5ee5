"""Compare two results, row by row: better, worse, same, or no verdict. Pure.

**The unit is the launch.** Calls within one launch are correlated, so launches are compared, by the logarithm of the
lower quartile of their calls (`sides.values_of` explains why). Tests and intervals are those of `shift.py`.

**Interleaved or not.** Launches that alternate in time (A B B A ...) are paired with their neighbours. Both launches of
a
pair see the same machine load, and drift cancels. Between results of different times, drift cannot be distinguished
from
a real difference. There, a significant difference must exceed 5 % plus the drift within either result, and a host
loaded
by others (30 %) gives no verdict at all.

**The family.** If two results are equal, at most 2 % of comparisons report any better or worse, however many rows they
have. Half of the 2 % is spent on the median over all rows, which is less noisy than any of them, and half on the rows
(Holm 1979: the k-th smallest of m p-values is compared with its half / (m - k + 1)). An interval has the confidence
level
used for its verdict. 2 % instead of 5 %, because a gate that runs fifty times should seldom be wrong three times.

Simulated, with launches that spread by 17 % (three of them), heavy tails and a drift of +-10 %: four rows, 30 launches
each, interleaved: 2 % false, 10 % slower found in 97 %, 25 % always. Six rows at two times, 5 to 24 launches each: 1 %
false, 10 % found in 5 to 11 %, 25 % in 35 to 47 %, 50 % in 82 to 98 %. benchmarks/a_a_compare.py measures it.

    worse, better   the interval excludes equality, and does not lie within +-5 %
    same            the interval and the ratio of medians both lie within +-5 %: there were enough launches to see a
                    difference, and there is none
    no verdict      anything else, with the reason: too few launches, other load on one side, not measured on one side
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, Generic, Literal, TypeVar

from muster.jobs.basics.errors import RefusedError
from muster.jobs.measuring.launches import MeasuredRow
from muster.jobs.measuring.shift import Shift, student_quantile, unpaired_ranks
from muster.jobs.measuring.sides import EQUAL, LEAST_LAUNCHES, Sides, sides_of, together, values_of

FOREIGN_LIMIT: Final = 0.05  # share of CPU time used by others from which a row is flagged
ALPHA: Final = 0.02  # chance of any false verdict in a comparison
HOGGED: Final = 0.30  # foreign load above which results of different times are not compared
TO_FIND: Final = math.log(1.10)  # the difference for which the number of launches needed is reported
MISSED: Final = 0.05  # accepted share of such differences that are missed
MANY: Final = 1000  # degrees of freedom
BAD: Final = frozenset({"failed", "timeout", "wrong"})

RowT = TypeVar("RowT", bound=MeasuredRow)
Answer = Literal["better", "worse", "same", "no verdict"]


@dataclass(frozen=True)
class Verdict(Generic[RowT]):
    """The verdict on one row, or on all rows together. `ratio` is time after / before: above 1 is slower."""

    verdict: Answer
    why: str
    row: RowT | None = None  # the row in the later result; None: the verdict is on all rows
    before_us: float | None = None
    after_us: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    confidence: float | None = None  # of the interval from low to high: higher if more rows are compared
    launches: tuple[int, int] = (0, 0)
    interleaved: bool = False


@dataclass(frozen=True)
class Comparison(Generic[RowT]):
    """The result of a whole comparison; gates use `verdict`.

    worse: any row is worse, or all together; better: some rows are better and none is worse; same: every row of the
    result before was compared and is the same; no verdict: anything else, such as no row with a verdict.
    """

    rows: list[Verdict[RowT]]
    together: Verdict[RowT]
    only_before: int
    only_after: int
    vanished: int = 0  # rows with a time before but none after: missing, refused, or failed

    @property
    def verdict(self) -> Answer:
        said = [each.verdict for each in (*self.rows, self.together)]
        for answer in ("worse", "better"):
            if answer in said:
                return answer
        same = not self.only_before and all(each.verdict == "same" for each in self.rows)
        return "same" if same else "no verdict"

    def count(self, answer: Answer) -> int:
        """Count the rows with this verdict."""
        return sum(each.verdict == answer for each in self.rows)

    def line(self) -> str:
        """Summarize in one line."""
        counts = ", ".join(
            f"{self.count(answer)} {answer}"
            for answer in ("worse", "better", "same", "no verdict")
            if self.count(answer)
        )
        alone = self.only_before + self.only_after
        more = f"; {alone} in one of them only" if alone else ""
        more += f"; {self.vanished} measured before but not after" if self.vanished else ""
        return f"{self.verdict}: of {len(self.rows)} common rows {counts}{more}"


def comparison(before: Sequence[RowT], after: Sequence[RowT]) -> Comparison[RowT]:
    """Compare all rows that both results have, and all of them together.

    Raises:
        RefusedError: if they have no row in common, so that there is nothing to compare.
    """
    earlier = {row.key: row for row in before}
    common = [(earlier[row.key], row) for row in after if row.key in earlier]
    if not common:
        raise RefusedError(
            f"compare: no row in common ({len(before)} rows before, {len(after)} after); name two results that "
            "measured the same: operations, sizes, types and worlds, or models, passes, precisions, batches and devices"
        )
    found = [_unfit(old, new) for old, new in common]
    sides = {i: sides_of(*common[i]) for i, verdict in enumerate(found) if verdict is None}
    whole = together(list(sides.values()))
    drift = whole.drift if whole else 0.0  # drift affects all rows
    alpha = ALPHA / 2 if whole else ALPHA
    of_all: Verdict[RowT] = Verdict("no verdict", "fewer than two rows can be judged")
    if whole:
        (of_all,) = _judge([whole], drift, alpha)
    judged = _judge(list(sides.values()), drift, alpha)
    for i, verdict in zip(sides, judged, strict=True):
        found[i] = _of_row(verdict, *common[i])
    of_before, of_after = ({row.key for row in rows if row.is_measured} for rows in (before, after))
    return Comparison(
        rows=[verdict for verdict in found if verdict is not None],
        together=of_all,
        only_before=len(before) - len(common),
        only_after=len(after) - len(common),
        vanished=len(of_before - of_after),
    )


def _unfit(before: RowT, after: RowT) -> Verdict[RowT] | None:
    """Return the verdict for a row whose times cannot be compared or need not be; else None."""
    answer, why = _by_state(before, after) or _by_launches(before, after) or _by_load(before, after) or ("", "")
    return _of_row(Verdict(answer, why), before, after) if answer else None


def _by_state(before: MeasuredRow, after: MeasuredRow) -> tuple[Answer, str] | None:
    was_bad, is_bad = (row.state == "wrong" or (row.state in BAD and not row.is_measured) for row in (before, after))
    if is_bad and not was_bad and before.is_measured:
        return "worse", f"after: {_state(after)}"
    if was_bad and not is_bad and after.is_measured:
        return "better", f"before: {_state(before)}"
    for side, row in (("before", before), ("after", after)):
        if row.state == "wrong" or not row.is_measured:
            return "no verdict", f"{side}: {_state(row)}"
    return None


def _by_launches(before: MeasuredRow, after: MeasuredRow) -> tuple[Answer, str] | None:
    if why := before.unlike(after):
        return "no verdict", why
    if min(before.launches, after.launches) < LEAST_LAUNCHES:
        return "no verdict", f"{before.launches} and {after.launches} launches; {LEAST_LAUNCHES} are the least"
    if min(min(values) for values in values_of(before, after)) <= 0:
        return "no verdict", "a time of 0"
    return None


def _by_load(before: MeasuredRow, after: MeasuredRow) -> tuple[Answer, str] | None:
    """Refuse a verdict for launches on hosts that others used, unless both sides were equally affected."""
    x, y = ([share for share in row.launch_foreign if share is not None] for row in (before, after))
    if not x or not y:
        return None
    interleaved = sides_of(before, after).interleaved
    share, other = median(x), median(y)
    found = f"foreign load {share:.0%} before, {other:.0%} after"
    # Shares of short blocks are noisy. For interleaved launches only a significant difference counts.
    if abs(share - other) > FOREIGN_LIMIT and (not interleaved or unpaired_ranks(x, y).p_value() <= ALPHA):
        return "no verdict", found
    if not interleaved and max(share, other) > HOGGED:
        return "no verdict", f"{found}: too much to compare two times; interleave the launches (A B B A)"
    return None


def _judge(family: Sequence[Sides], drift: float, alpha: float) -> list[Verdict[Any]]:
    """Judge a family so that the chance of any false better or worse is at most alpha, by Holm's procedure."""
    count = len(family)
    tests = [sides.test(alpha / count) for sides in family]
    margins = [sides.margin(drift) for sides in family]
    p_values = [_beyond(test, margin) for test, margin in zip(tests, margins, strict=True)]
    levels = [0.0] * count
    left, stopped = count, False
    for place in sorted(range(count), key=p_values.__getitem__):
        levels[place] = alpha / left
        stopped = stopped or p_values[place] > levels[place]
        left -= not stopped
    return [
        _verdict(sides, test, margin, level)
        for sides, test, margin, level in zip(family, tests, margins, levels, strict=True)
    ]


def _beyond(test: Shift, margin: float) -> float:
    """Return the p-value of the hypothesis that the shift is within +-margin."""
    if abs(test.estimate) <= margin and margin:
        return 1.0
    return test.p_value(math.copysign(margin, test.estimate))


def _verdict(sides: Sides, test: Shift, margin: float, level: float) -> Verdict[Any]:
    low, high = test.interval(level)
    if low >= -EQUAL and high <= EQUAL:
        answer: Answer = "same"
        why = "within +-5 %"
    elif low > margin:
        answer, why = "worse", "significantly slower"
    elif high < -margin:
        answer, why = "better", "significantly faster"
    else:
        answer, why = "no verdict", _too_few(sides, level)
    return Verdict(
        answer,
        why,
        ratio=math.exp(test.estimate),
        low=math.exp(low),
        high=math.exp(high) if high < math.inf else math.inf,
        confidence=1 - level,
        launches=sides.launches,
        interleaved=sides.interleaved,
    )


def _too_few(sides: Sides, level: float) -> str:
    """Estimate, from the observed spread, the number of launches to detect a 10 % difference in 95 % of comparisons."""
    launches = min(sides.launches)
    error = (student_quantile(level, MANY) + student_quantile(2 * MISSED, MANY)) * sides.mean().error
    reach = TO_FIND if sides.interleaved else TO_FIND - EQUAL
    needed = math.ceil(launches * (error / reach) ** 2)
    if needed <= launches:
        return "the difference is too small for a verdict, but too large to be the same"
    apart = (
        ""
        if sides.interleaved
        else ", interleaved if possible (A B B A), because results of two times also drift apart"
    )
    return f"launches vary too much: about {needed} of each could detect 10 %{apart}"


def _of_row(verdict: Verdict[RowT], before: RowT, after: RowT) -> Verdict[RowT]:
    """Attach a verdict to its row. If some launches failed, the verdict cannot be better or same."""
    answer, why = verdict.verdict, verdict.why
    if answer == "same" and abs(apart := math.log((after.p50_us or 1.0) / (before.p50_us or 1.0))) > EQUAL:
        answer, why = "no verdict", f"the faster calls are the same, but the medians are {math.exp(apart):.2f}x"
    if after.state in BAD and verdict.ratio is not None:
        why = f"{why}; after: {_state(after)}"
        answer = "worse" if answer == "worse" else "no verdict"
    return replace(
        verdict,
        verdict=answer,
        why=why,
        row=after,
        before_us=before.p50_us,
        after_us=after.p50_us,
        launches=verdict.launches if verdict.ratio is not None else (before.launches, after.launches),
    )


def _state(row: MeasuredRow) -> str:
    return f"{row.state}: {row.reason}" if row.reason else row.state
