"""Cut a model into stages: evenly, balanced by weight, or at given layers.

    even(7, 3)                                 (0, 3, 5)     layers 0 1 2 | 3 4 | 5 6
    balanced([1, 1, 1, 1, 1, 4], 3)            (0, 3, 5)     weights 1 1 1 | 1 1 | 4
    by_hand([2, 5], 7, 3)                      (0, 2, 5)     layers 0 1 | 2 3 4 | 5 6

Cuts are the first layers of the stages. A stage has at least one layer, and layers keep their order. The heaviest stage
determines the throughput of a pipeline. Weights may be counts, parameters, floating point operations or seconds
(`pipe/boundaries.py` computes them). They are scaled to integers before they are added, so that no result depends on
rounding.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

Cuts = tuple[int, ...]


def even(layers: int, stages: int) -> Cuts:
    """Cut by layer count. Stages differ by at most one layer; longer stages come first.

    Raises:
        ValueError: If there are no stages, or more stages than layers.
    """
    _check(layers, stages)
    length, longer = divmod(layers, stages)
    return tuple(stage * length + min(stage, longer) for stage in range(stages))


def by_hand(bounds: Sequence[int], layers: int, stages: int) -> Cuts:
    """Check the cuts that a user wrote, which are the first layers of the stages. The 0 of the first stage may be
    omitted.

    Raises:
        ValueError: If the number of stages is wrong, a stage has no layers, or a layer does not exist.
    """
    _check(layers, stages)
    cuts = tuple(bounds) if tuple(bounds[:1]) == (0,) else (0, *bounds)
    wanted = f"expected the first layers of stages 1 to {stages - 1}, increasing, from 1 to {layers - 1}"
    if stages == 1:
        wanted = "expected none for one stage"
    if len(cuts) != stages:
        made = f"{_counted(len(cuts), 'stage')} of {_counted(layers, 'layer')}"
        raise ValueError(f"cuts {list(bounds)} make {made}, not {stages}; {wanted}")
    for before, after in pairwise(cuts):
        if after <= before:
            raise ValueError(f"cuts {list(bounds)}: {after} is not greater than {before}; {wanted}")
    if cuts[-1] >= layers:
        raise ValueError(f"cuts {list(bounds)}: there is no layer {cuts[-1]}, only {layers} layers; {wanted}")
    return cuts


def balanced(weights: Sequence[float], stages: int) -> Cuts:
    """Cut so that the heaviest stage is as light as possible, then so that the sum of squared stage weights is minimal.

    Among equally good cuts, choose the one with more layers in the first stage, then in the second stage, and so on.
    The result is optimal, by dynamic programming over suffixes of the model (the linear partition problem).

    Raises:
        ValueError: If there are more stages than layers, or a weight is negative or not finite.
    """
    _check(len(weights), stages)
    until = (0, *accumulate(_whole(weights)))  # until[i]: total weight of the layers before i
    limit = _least_bottleneck(until, stages)
    layers, nothing_fits = len(weights), None
    # least[i]: smallest sum of squares if layers i and up form the last stages; first[i]: end of the first of these
    # stages
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
    """Cut for ranks with several stages, so that the heaviest rank is as light as possible.

    `rank_of[stage]` is the rank that holds a stage, as in `Schedule`. With one stage per rank, the result is that of
    `balanced`. Otherwise, starting from `balanced`, it moves runs of adjacent cuts by one layer as long as this makes
    the heaviest rank lighter, or ranks more equal. This local search is never worse than `balanced`, but may miss the
    optimum.

    Raises:
        ValueError: In the same cases as `balanced`.
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
    """Return the number of layers of every stage."""
    return tuple(end - start for start, end in pairwise((*cuts, layers)))


def _neighbours(cuts: Cuts, layers: int) -> list[Cuts]:
    """List the alternatives to `cuts` in which one run of adjacent cuts is moved by one layer."""
    found = []
    for first in range(1, len(cuts)):
        for last in range(first + 1, len(cuts) + 1):
            for by in (-1, 1):
                moved = (*cuts[:first], *(cut + by for cut in cuts[first:last]), *cuts[last:])
                if min(lengths(moved, layers)) > 0:
                    found.append(moved)
    return found


def _least_bottleneck(until: Sequence[int], stages: int) -> int:
    """Return the smallest possible weight of the heaviest stage."""
    layers = len(until) - 1
    least = [until[layers] - until[start] for start in range(layers)]  # one stage with all layers from `start` on
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
    """Scale weights to integers, exactly: every float is an integer divided by a power of two."""
    for layer, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"weights: layer {layer} has weight {weight}; expected a finite number of 0 or more")
    exact = [Fraction(weight) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    return [int(weight * common) for weight in exact]


def _check(layers: int, stages: int) -> None:
    if stages < 1:
        raise ValueError(f"{stages} stages: expected at least 1")
    if stages > layers:
        raise ValueError(
            f"{stages} stages of {_counted(layers, 'layer')}: a stage needs at least one layer; use at most {layers}"
        )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
