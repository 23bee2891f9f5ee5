"""Compare two results, row by row: better, worse, same, or no verdict. Pure.

**The unit is the launch.** Calls within one launch are correlated, so launches are compared, by the logarithm of the
lower quartile of their calls (`sides.values_of` explains why). Tests and intervals are those of `shift.py`.

**Interleaved or not.** Launches that alternate in time (A B B A ...) are paired with their neighbours. Both launches of
a pair see the same machine load, and drift cancels. If the results were measured at different times, drift cannot be
distinguished from a real difference. A significant difference must then exceed 5 % plus twice the drift within either
result, and there is no verdict at all if other programs used more than 30 % of a host's CPUs.

**The family.** If two results are equal, at most 2 % of comparisons report any row as better or worse, for any number
of rows. Half of the 2 % is spent on the median over all rows, which is less noisy than any single row. The other half
is spent on the rows (Holm 1979: the k-th smallest of m p-values is compared with 1 % / (m - k + 1)). An interval has
the confidence level used for its verdict. The limit is 2 % rather than 5 %, so that a gate that runs fifty times
reports about one false change instead of two or three.

This table lists the share of comparisons that report a change. The numbers are from simulations in which three launches
spread by 17 %, with heavy tails and a drift of +-10 %. The benchmark a_a_compare.py measures them on a machine.

                                                     no change   10 % slower   25 %         50 %
    four rows, 30 launches each, interleaved         2 %         97 %          100 %
    six rows at two times, 5 to 24 launches each     1 %         5 to 11 %     35 to 47 %   82 to 98 %

    worse, better   the interval excludes equality, and does not lie within +-5 %
    same            the interval and the ratio of medians both lie within +-5 %: there were enough launches to detect a
                    difference, and there is none
    no verdict      all other cases, with the reason: too few launches, or load or missing values on one side
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

FOREIGN_LIMIT: Final = 0.05  # a row is flagged if other programs used more than this share of the CPUs
ALPHA: Final = 0.02  # chance of any false verdict in a comparison
# If other programs use more than this share of the CPUs, results of different times are not compared.
HOGGED: Final = 0.30
TO_FIND: Final = math.log(1.10)  # the difference to detect with the estimated number of launches
MISSED: Final = 0.05  # accepted probability that such a difference is not detected
MANY: Final = 1000  # degrees of freedom with which Student's t is almost a normal distribution
BAD: Final = frozenset({"failed", "timeout", "wrong"})

RowT = TypeVar("RowT", bound=MeasuredRow)
Answer = Literal["better", "worse", "same", "no verdict"]


@dataclass(frozen=True)
class RowVerdict(Generic[RowT]):
    """The verdict on one row, or on all rows together. `ratio` is time after / before: above 1 is slower."""

    verdict: Answer
    why: str
    row: RowT | None = None  # the row in the later result; None if the verdict is about all rows
    before_us: float | None = None
    after_us: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    confidence: float | None = None  # confidence of the interval from low to high; higher if more rows are compared
    launches: tuple[int, int] = (0, 0)
    interleaved: bool = False


@dataclass(frozen=True)
class Comparison(Generic[RowT]):
    """The result of a whole comparison; gates use `verdict`.

    worse: a row is worse, or all rows together; better: a row is better, and none is worse; same: every row of the
    earlier result was compared and is the same; no verdict: all other cases, such as no row with a verdict.
    """

    rows: list[RowVerdict[RowT]]
    together: RowVerdict[RowT]
    only_before: int
    only_after: int
    vanished: int = 0  # rows with a time before but none after: missing, refused, or failed

    @property
    def verdict(self) -> Answer:
        verdicts = [each.verdict for each in (*self.rows, self.together)]
        for answer in ("worse", "better"):
            if answer in verdicts:
                return answer
        same = not self.only_before and all(each.verdict == "same" for each in self.rows)
        return "same" if same else "no verdict"

    def count(self, answer: Answer) -> int:
        """Count the rows with this verdict."""
        return sum(each.verdict == answer for each in self.rows)

    def line(self) -> str:
        """Summarize the comparison in one line."""
        counts = ", ".join(
            f"{self.count(answer)} {answer}"
            for answer in ("worse", "better", "same", "no verdict")
            if self.count(answer)
        )
        alone = self.only_before + self.only_after
        more = f"; {alone} in only one result" if alone else ""
        more += f"; {self.vanished} measured before but not after" if self.vanished else ""
        return f"{self.verdict}: of {len(self.rows)} common rows {counts}{more}"


def comparison(before: Sequence[RowT], after: Sequence[RowT]) -> Comparison[RowT]:
    """Compare each row that both results have, and all these rows together.

    Raises:
        RefusedError: if the results have no row in common.
    """
    earlier = {row.key: row for row in before}
    common = [(earlier[row.key], row) for row in after if row.key in earlier]
    if not common:
        raise RefusedError(
            f"compare: no row in common ({len(before)} rows before, {len(after)} after); name two results "
            "of the same operations, sizes, types and worlds, or models, passes, precisions, batches and devices"
        )
    found = [_unfit(old, new) for old, new in common]
    sides = {i: sides_of(*common[i]) for i, verdict in enumerate(found) if verdict is None}
    whole = together(list(sides.values()))
    drift = whole.drift if whole else 0.0  # the drift affects all rows
    alpha = ALPHA / 2 if whole else ALPHA
    of_all: RowVerdict[RowT] = RowVerdict("no verdict", "fewer than two rows can be compared")
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


def _unfit(before: RowT, after: RowT) -> RowVerdict[RowT] | None:
    """Return the verdict on a row if its times cannot, or need not, be compared; else None."""
    answer, why = _by_state(before, after) or _by_launches(before, after) or _by_load(before, after) or ("", "")
    return _of_row(RowVerdict(answer, why), before, after) if answer else None


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
        return "no verdict", f"{before.launches} and {after.launches} launches, expected at least {LEAST_LAUNCHES}"
    if min(min(values) for values in values_of(before, after)) <= 0:
        return "no verdict", "a time of 0"
    return None


def _by_load(before: MeasuredRow, after: MeasuredRow) -> tuple[Answer, str] | None:
    """Refuse a verdict if other programs used the CPUs of the hosts, unless both sides were affected equally."""
    x, y = ([share for share in row.launch_foreign if share is not None] for row in (before, after))
    if not x or not y:
        return None
    interleaved = sides_of(before, after).interleaved
    share, other = median(x), median(y)
    found = f"other programs used {share:.0%} of the CPUs before, {other:.0%} after"
    # Shares in short blocks are noisy, so with interleaved launches only a significant difference counts.
    if abs(share - other) > FOREIGN_LIMIT and (not interleaved or unpaired_ranks(x, y).p_value() <= ALPHA):
        return "no verdict", found
    if not interleaved and max(share, other) > HOGGED:
        return "no verdict", f"{found}: too much to compare two runs; interleave their launches (A B B A)"
    return None


def _judge(family: Sequence[Sides], drift: float, alpha: float) -> list[RowVerdict[Any]]:
    """Judge a family of rows by Holm's procedure: the chance of a false "better" or "worse" is at most `alpha`."""
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


def _verdict(sides: Sides, test: Shift, margin: float, level: float) -> RowVerdict[Any]:
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
    return RowVerdict(
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
    """Estimate from the spread how many launches would detect a 10 % difference in 95 % of comparisons."""
    launches = min(sides.launches)
    error = (student_quantile(level, MANY) + student_quantile(2 * MISSED, MANY)) * sides.mean().error
    reach = TO_FIND if sides.interleaved else TO_FIND - EQUAL
    needed = math.ceil(launches * (error / reach) ** 2)
    if needed <= launches:
        return "the difference is too small to be significant, but too large to be the same"
    apart = (
        ""
        if sides.interleaved
        else ", interleaved if possible (A B B A), because results measured at different times also drift apart"
    )
    return f"launches vary too much: about {needed} launches of each result could detect 10 %{apart}"


def _of_row(verdict: RowVerdict[RowT], before: RowT, after: RowT) -> RowVerdict[RowT]:
    """Attach a verdict to its row. If some launches failed, the verdict cannot be better or same."""
    answer, why = verdict.verdict, verdict.why
    if answer == "same" and abs(apart := math.log((after.p50_us or 1.0) / (before.p50_us or 1.0))) > EQUAL:
        answer, why = "no verdict", f"the lower quartiles are the same, but the medians differ: {math.exp(apart):.2f}x"
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
