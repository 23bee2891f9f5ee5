"""The predictions of a profile: from a curve, from curves of other worlds, or from the formulas alone. Pure."""

import math
from dataclasses import dataclass
from typing import Final

from muster.collectives_bench.catalog import OPERATIONS
from muster.collectives_bench.cost.constants import UNSURE, Constants
from muster.collectives_bench.cost.curves import FAR, Curve
from muster.collectives_bench.cost.formulas import cost
from muster.collectives_bench.sizes import size_text

FAR_WORLD: Final = 2  # predictions beyond this multiple of the largest measured world get a warning


@dataclass(frozen=True)
class Prediction:
    """A predicted time, the interval that should contain 90 % of measurements, and the basis of the prediction."""

    seconds: float
    low_s: float
    high_s: float
    how: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exchange:
    """The exchange to predict."""

    operation: str
    nbytes: float
    ranks: int
    nodes: int
    backend: str
    dtype: str | None


def nearest_type(curves: list[Curve], dtype: str | None) -> Curve:
    """Return the curve of the requested dtype, or else of fp32. If there are several, return the most usual one."""
    return min(curves, key=lambda each: (each.dtype != dtype, each.dtype != "fp32", *unusual(each)))


def unusual(curve: Curve) -> tuple[bool, ...]:
    """Return a sort key that puts gloo on the CPU, the operation's default place and blocking calls first."""
    usual = OPERATIONS[curve.operation].places[0]
    return curve.backend == "gloo" and curve.device != "cpu", curve.place != usual, curve.call != "sync"


def _of_type(measured: str, wanted: str | None) -> tuple[str, ...]:
    if wanted in (None, measured):
        return ()
    return (f"{wanted} was not measured: the time is for the same number of bytes of {measured}",)


def _far(nbytes: float, smallest: float, largest: float) -> tuple[str, ...]:
    if nbytes > FAR * largest > 0:
        return (f"{size_text(nbytes)} is more than {FAR:g} times the largest size measured, {size_text(largest)}",)
    if 0 < nbytes * FAR < smallest:
        return (f"{size_text(nbytes)} is less than 1/{FAR:g} of the smallest size measured, {size_text(smallest)}",)
    return ()


def _far_world(worlds: list[int], ranks: int) -> tuple[str, ...]:
    if ranks <= FAR_WORLD * worlds[-1]:
        return ()
    return (f"{ranks} ranks are more than {FAR_WORLD} times the largest world measured, {worlds[-1]}",)


def from_curve(curve: Curve, asked: Exchange) -> Prediction:
    """Predict from the measurements of the requested operation in the requested world."""
    seconds = curve.seconds(asked.nbytes)
    warnings = _of_type(curve.dtype, asked.dtype) + _far(asked.nbytes, curve.smallest, curve.largest)
    return Prediction(seconds, seconds * curve.low, seconds * curve.high, curve.how(asked.nbytes), warnings)


def carried_over(constants: Constants, curves: list[Curve], asked: Exchange) -> Prediction:
    """Predict from the curves of other worlds, scaled by the formulas.

    Each measured world shows the formulas' error. Between two measured worlds, the error is interpolated in log n.
    Outside of the measured range, the error of the nearest world is used.
    """
    away = {}
    for each in (nearest_type(same, asked.dtype) for same in _by_world(curves)):
        there = _formula(constants, asked, each.ranks, each.nodes)
        away[each.ranks, each.nodes] = math.log(each.seconds(asked.nbytes) / there)
    here = _formula(constants, asked, asked.ranks, asked.nodes)
    seconds = here * math.exp(_between(away, asked))
    curve = nearest_type(curves, asked.dtype)
    worlds = sorted({each.ranks for each in curves})
    how = f"formula, fitted on {'world' if len(worlds) == 1 else 'worlds'} {', '.join(map(str, worlds))}"
    warnings = (
        _of_type(curve.dtype, asked.dtype)
        + _far(asked.nbytes, curve.smallest, curve.largest)
        + _far_world(worlds, asked.ranks)
    )
    doubt = max(1.0, math.log2(asked.ranks / worlds[-1]))  # number of doublings beyond the largest measured world
    return Prediction(seconds, seconds * constants.low**doubt, seconds * constants.high**doubt, how, warnings)


def _formula(constants: Constants, asked: Exchange, ranks: int, nodes: int) -> float:
    """Return the time from the formulas.

    If it is 0, because the fitted cost of a message is 0, return the message count.
    """
    seconds = constants.of(asked.operation, asked.nbytes, ranks=ranks, nodes=nodes)
    return seconds or cost(asked.operation, asked.nbytes, ranks=ranks, nodes=nodes, backend=asked.backend).steps


def _by_world(curves: list[Curve]) -> list[list[Curve]]:
    found: dict[tuple[int, int], list[Curve]] = {}
    for curve in curves:
        found.setdefault((curve.ranks, curve.nodes), []).append(curve)
    return list(found.values())


def _between(away: dict[tuple[int, int], float], asked: Exchange) -> float:
    """Interpolate log(measured / formula) for a world. `away` has this value for other worlds, by (ranks, nodes)."""
    alike = [
        world for world in away if world[0] * asked.nodes == world[1] * asked.ranks or asked.nodes == world[1] == 1
    ]
    below = max((world for world in alike if world[0] < asked.ranks), default=None)
    above = min((world for world in alike if world[0] > asked.ranks), default=None)
    if below and above:
        share = math.log(asked.ranks / below[0]) / math.log(above[0] / below[0])
        return (1 - share) * away[below] + share * away[above]
    nearest = min(
        away,
        key=lambda world: abs(math.log(world[0] / asked.ranks)) + abs(math.log(world[1] / asked.nodes)),
    )
    return away[nearest]


def by_formula(constants: Constants, asked: Exchange) -> Prediction:
    """Predict an operation that was not measured."""
    nodes = asked.nodes if constants.worlds or asked.nodes > 1 else asked.ranks  # given links have one node per rank
    seconds = constants.of(asked.operation, asked.nbytes, ranks=asked.ranks, nodes=nodes)
    if not constants.worlds:
        return Prediction(seconds, seconds, seconds, "formula, for the given link")
    how = f"formula, fitted on worlds {', '.join(map(str, constants.worlds))} with other operations"
    warnings = (f"{asked.operation} was not measured", *_far(asked.nbytes, *constants.sizes))
    return Prediction(seconds, seconds * UNSURE[0], seconds * UNSURE[1], how, warnings)
