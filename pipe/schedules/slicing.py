"""Cut sequences into slices so that a pipeline over tokens takes the least time (Li et al. 2021, "TeraPipe").

    step = m sum(t_i) + (p - 1) max(t_i)        p stages, m micro-batches; t_i: a slice on one stage, both directions

Later slices attend to more tokens, so equal times need shorter slices towards the end. The first term favours few
slices, because every slice has a fixed cost; the second one favours short slices.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

GRID = 64  # slices begin at multiples of 1/64 of the sequence


@dataclass(frozen=True)
class SliceTimes:
    """Seconds of a slice on one stage, forward and backward: `fixed + per_token n + per_pair (pairs)`.

    Pairs are the (query, key) pairs of n tokens that attend to themselves and to the `begin` tokens before them.
    """

    fixed: float
    per_token: float
    per_pair: float

    def __call__(self, begin: int, tokens: int) -> float:
        """Return the seconds of a slice of some tokens that begins at token `begin`."""
        return self.fixed + self.per_token * tokens + self.per_pair * tokens * (begin + tokens)


def equal_slices(length: int, count: int) -> tuple[int, ...]:
    """Cut a sequence into `count` slices whose lengths differ by at most one token, longer ones first."""
    each, longer = divmod(length, count)
    return tuple(each + (index < longer) for index in range(count))


def step_seconds(tokens: Sequence[int], stages: int, microbatches: int, seconds: Callable[[int, int], float]) -> float:
    """Return the time of a step whose sequences are cut into slices of these lengths. Messages take no time."""
    begins = (sum(tokens[:index]) for index in range(len(tokens)))
    each = [seconds(begin, length) for begin, length in zip(begins, tokens, strict=True)]
    return microbatches * sum(each) + (stages - 1) * max(each)


def best_slices(length: int, stages: int, microbatches: int, seconds: Callable[[int, int], float]) -> tuple[int, ...]:
    """Return the lengths of the slices with the least `step_seconds`, on a grid of at most 64 cuts per sequence.

    For every possible length of the longest slice, dynamic programming finds the cut with the least sum. At worst this
    takes O(64^4) additions. Bounds on the sum avoid most of these additions.

    Raises:
        ValueError: If the length, the stages or the micro-batches are less than 1.
    """
    if min(length, stages, microbatches) < 1:
        raise ValueError(
            f"slices: length {length}, stages {stages}, micro-batches {microbatches}; all must be 1 or more"
        )
    marks = sorted({round(length * index / GRID) for index in range(GRID + 1)})
    times = {(i, j): seconds(marks[i], marks[j] - marks[i]) for j in range(len(marks)) for i in range(j)}
    least = math.inf
    best: tuple[int, ...] = (length,)
    floor = _least_sum(times, len(marks), math.inf)[0]
    for longest in sorted(set(times.values())):
        if microbatches * floor + (stages - 1) * longest >= least:
            break  # longer slices cannot be better
        total, cuts = _least_sum(times, len(marks), longest)
        if microbatches * total + (stages - 1) * longest < least:
            least = microbatches * total + (stages - 1) * longest
            best = tuple(marks[end] - marks[begin] for begin, end in cuts)
    return best


def _least_sum(times: dict[tuple[int, int], float], marks: int, longest: float) -> tuple[float, list[tuple[int, int]]]:
    """Return the least total time of slices of at most `longest` each, and their ends; infinity if no cut fits."""
    sums, begins = [0.0] + [math.inf] * (marks - 1), [0] * marks
    for end in range(1, marks):
        for begin in range(end):
            if (each := times[begin, end]) <= longest and sums[begin] + each < sums[end]:
                sums[end], begins[end] = sums[begin] + each, begin
    if sums[-1] == math.inf:
        return math.inf, []
    cuts, end = list[tuple[int, int]](), marks - 1
    while end:
        cuts.append((begins[end], end))
        end = begins[end]
    return sums[-1], cuts[::-1]
