"""Where a model is cut into stages: evenly, so that the heaviest stage is as light as can be, or by hand.

    even(7, 3)                                 (0, 3, 5)     layers 0 1 2 | 3 4 | 5 6
    balanced([1, 1, 1, 1, 1, 4], 3)            (0, 3, 5)     weights 1 1 1 | 1 1 | 4
    by_hand([2, 5], 7, 3)                      (0, 2, 5)     layers 0 1 | 2 3 4 | 5 6

Cuts are the first layer of every stage. A stage has one layer at least, and layers stay in their order. What the
heaviest stage takes is what a steady pipeline takes for a micro-batch. Weights are any numbers: counts, parameters,
floating point operations, seconds (`pipe/boundaries.py` has them). Nothing here depends on a rounding: weights are
made whole numbers before they are added.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

Cuts = tuple[int, ...]


def even(layers: int, stages: int) -> Cuts:
    """Cut by count: stages differ by one layer at most, the longer ones come first.

    Raises:
        ValueError: more stages than layers, or none.
    """
    _check(layers, stages)
    length, longer = divmod(layers, stages)
    return tuple(stage * length + min(stage, longer) for stage in range(stages))


def by_hand(bounds: Sequence[int], layers: int, stages: int) -> Cuts:
    """Take cuts as somebody wrote them: the first layer of every stage, where the first stage's 0 may be left out.

    Raises:
        ValueError: another number of stages, a stage without layers, or a layer that is not there.
    """
    _check(layers, stages)
    cuts = tuple(bounds) if tuple(bounds[:1]) == (0,) else (0, *bounds)
    wanted = f"wanted {stages - 1} first layers of stages 1 to {stages - 1}, rising, of 1 to {layers - 1}"
    if stages == 1:
        wanted = "wanted none for one stage"
    if len(cuts) != stages:
        made = f"{_counted(len(cuts), 'stage')} of {_counted(layers, 'layer')}"
        raise ValueError(f"cuts {list(bounds)}: make {made}, not {stages}; {wanted}")
    for before, after in pairwise(cuts):
        if after <= before:
            raise ValueError(f"cuts {list(bounds)}: {after} does not come after {before}; {wanted}")
    if cuts[-1] >= layers:
        raise ValueError(f"cuts {list(bounds)}: there is no layer {cuts[-1]} among {layers}; {wanted}")
    return cuts


def balanced(weights: Sequence[float], stages: int) -> Cuts:
    """Cut so that the heaviest stage is as light as possible; then so that squares of stages sum to the least.

    Of cuts that are still equal, those come first whose first stage has more layers, then the second, and so on. Exact,
    by dynamic programming over suffixes of the model (the linear partition problem).

    Raises:
        ValueError: more stages than layers, or a weight that is negative or no number.
    """
    _check(len(weights), stages)
    until = (0, *accumulate(_whole(weights)))  # until[i]: weight of layers before i
    limit = _least_bottleneck(until, stages)
    layers, nothing_fits = len(weights), None
    # least[i]: squares of the best cut of layers from i on into the stages so far; first[i]: its first stage's end.
    least: list[int | None] = [nothing_fits] * layers + [0]
    ends: list[list[int]] = []
    for remaining in range(stages):
        now: list[int | None] = [nothing_fits] * (layers + 1)
        first = [0] * (layers + 1)
        for start in range(layers - remaining):
            for end in range(start + 1, layers - remaining + 1):
                weight = until[end] - until[start]
                if weight > limit:
                    break
                rest, best = least[end], now[start]
                if rest is not None and (best is None or weight * weight + rest <= best):
                    now[start], first[start] = weight * weight + rest, end
        least = now
        ends.append(first)
    cuts = [0]
    for first in reversed(ends[1:]):
        cuts.append(first[cuts[-1]])
    return tuple(cuts)


def balanced_ranks(weights: Sequence[float], rank_of: Sequence[int]) -> Cuts:
    """Cut for ranks of several stages: the heaviest rank's stages together are to be as light as possible.

    `rank_of[stage]` is the rank that has a stage, as in `Schedule`. With one stage a rank this is `balanced`. Else it
    begins there and moves runs of cuts by a layer as long as that makes the heaviest rank lighter, or ranks more alike:
    never worse than `balanced`, and a local search, not proved to be the best.

    Raises:
        ValueError: as `balanced`.
    """
    stages = len(rank_of)
    cuts = balanced(weights, stages)
    if len(set(rank_of)) == stages:
        return cuts
    until = (0, *accumulate(_whole(weights)))

    def cost(tried: Cuts) -> tuple[int, int]:
        ranks = dict.fromkeys(rank_of, 0)
        for rank, (start, end) in zip(rank_of, pairwise((*tried, len(weights))), strict=True):
            ranks[rank] += until[end] - until[start]
        return max(ranks.values()), sum(weight * weight for weight in ranks.values())

    best = cost(cuts)
    while True:
        tries = [(cost(tried), tried) for tried in _neighbours(cuts, len(weights))]
        least = min(tries, default=(best, cuts))
        if least[0] >= best:
            return cuts
        best, cuts = least


def lengths(cuts: Cuts, layers: int) -> tuple[int, ...]:
    """Return how many layers every stage has."""
    return tuple(end - start for start, end in pairwise((*cuts, layers)))


def _neighbours(cuts: Cuts, layers: int) -> list[Cuts]:
    """List the cuts in which a run of neighbouring cuts has moved by one layer."""
    found = []
    for first in range(1, len(cuts)):
        for last in range(first + 1, len(cuts) + 1):
            for by in (-1, 1):
                moved = (*cuts[:first], *(cut + by for cut in cuts[first:last]), *cuts[last:])
                if min(lengths(moved, layers)) > 0:
                    found.append(moved)
    return found


def _least_bottleneck(until: Sequence[int], stages: int) -> int:
    """Return the least weight that the heaviest of so many stages can have."""
    layers = len(until) - 1
    least = [until[layers] - until[start] for start in range(layers)]  # of one stage from `start` on
    for remaining in range(1, stages):
        now = least.copy()
        for start in range(layers - remaining):
            best = until[layers]
            for end in range(start + 1, layers - remaining + 1):
                weight = until[end] - until[start]
                best = min(best, max(weight, least[end]))
                if weight >= best:
                    break
            now[start] = best
        least = now
    return least[0]


def _whole(weights: Sequence[float]) -> list[int]:
    """Return weights as whole numbers in the same proportions: every float is one over a power of two."""
    for layer, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"weights: layer {layer} weighs {weight}; wanted a finite number from 0")
    exact = [Fraction(weight) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    return [int(weight * common) for weight in exact]


def _check(layers: int, stages: int) -> None:
    if stages < 1:
        raise ValueError(f"{stages} stages: wanted 1 at least")
    if stages > layers:
        raise ValueError(
            f"{stages} stages of {_counted(layers, 'layer')}: a stage has one layer at least; cut into {layers} at most"
        )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
