"""Decide which ranks are persistently slow, and name the node or GPU if all its ranks are. Pure.

    rank 0   compute          | wait      own time: a step without its waits for other ranks
    rank 1   compute (slow)           |   slow: a long own time, and the others wait for it
    rank 2   compute          | wait

Ranks are compared only within their team: ranks that do the same work in the same step. A team is one stage of a
pipeline in all its replicas. Its units are single ranks, or groups of tensor ranks, which wait for each other within a
step. A window holds the newest steps of every rank. The usual time of a unit is the median of the others' medians. A
unit is suspect in a window if two things hold:

    above      the median of its own time is at least ABOVE times the usual time
    waits      the others wait longer than it does, by at least half of its excess

It is named if it was suspect in WINDOWS windows in a row, and the median over these windows satisfies:

    effect     its own time is at least SLOW times the usual time
    chance     the lower end of the 99 % interval of its own time is at least LEAST times the usual time
    spread     its excess is at least OUTLIER robust standard deviations of the others' times (1.4826 x the median
               absolute deviation)

It remains named while it is suspect in half of the newest windows. A rank with more samples may take longer: the usual
time of a rank that has n samples is computed with the others' times scaled by n / their samples, if that exceeds 1.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from muster.launch.common.rankset import fold

if TYPE_CHECKING:
    from muster.jobs.spec.modes import Parallel

WINDOWS: Final = 4
STEPS: Final = 10  # the fewest steps of a rank in a window
ABOVE: Final = 1.03
SLOW: Final = 1.1
LEAST: Final = 1.05
OUTLIER: Final = 3.5
MOST_DEVIATIONS: Final = 1e6
DEVIATION: Final = 1.4826  # standard deviation / median absolute deviation, for normally distributed values
PRESENT: Final = 2 / 3  # share of a team's units that a window must have
MOST: Final = 64  # units of a team that are judged in a window: the slowest
PARTS: Final = ("data", "forward and backward", "optimizer")
KINDS: Final = ("node", "gpu", "rank", "ranks")

Unit = tuple[int, ...]  # a rank, or the tensor ranks of one replica
Team = Sequence[Unit]


class RankPace(NamedTuple):
    """A rank's steps in one window: medians, in seconds."""

    first: int  # step
    last: int
    own_s: float
    least_s: float  # the lower end of the 99 % interval of `own_s`
    waits_s: float
    samples: float  # per step; 0: unknown
    parts_s: tuple[float, float, float]  # as in PARTS


class Slowness(NamedTuple):
    """Measurements which show that ranks are slow, from one window or several. Times are in seconds per step."""

    own_s: float
    least_s: float  # the lower end of the 99 % interval of `own_s`
    usual_s: float  # the usual own time of the other ranks that do the same work
    waits_s: float  # how much longer the others wait in a step
    part: str  # the part of the step that contains most of the excess
    first_step: int
    last_step: int
    deviations: float = 0.0  # the excess, in robust standard deviations of the others' times


Window = Mapping[int, RankPace]
Verdicts = Mapping[Unit, Slowness]


@dataclass(frozen=True)
class Place:
    """Where a rank runs. `gpu`: its number on the node, or None."""

    node: int
    host: str
    gpu: int | None = None


@dataclass(frozen=True)
class Straggler:
    """A node, a GPU, a rank or a group of ranks that is persistently slow, with the evidence."""

    kind: str  # in KINDS
    node: int | None
    host: str
    gpu: int | None
    ranks: tuple[int, ...]
    slow: Slowness

    @property
    def name(self) -> str:
        """The name of the node, GPU or ranks."""
        who = f"rank{'s' * (len(self.ranks) > 1)} {fold(self.ranks)}"
        if self.node is None:
            return who
        node = f"node {self.node} ({self.host})"
        if self.kind == "node":
            return f"{node}, {who}"
        return f"GPU {self.gpu} of {node}, {who}" if self.kind == "gpu" else f"{who} on {node}"

    @property
    def evidence(self) -> str:
        """The measurements, as text."""
        slow = self.slow
        ms = [f"{each * 1e3:.3g}" for each in (slow.own_s, slow.usual_s, slow.waits_s)]
        ratio, least = slow.own_s / slow.usual_s, slow.least_s / slow.usual_s
        return (
            f"{ratio:.2f} x the usual own time of a step ({ms[0]} ms against {ms[1]} ms; at least {least:.2f} x), "
            f"most of it in {slow.part}; the others wait {ms[2]} ms longer per step (steps {slow.first_step} to "
            f"{slow.last_step})"
        )

    def record(self) -> dict[str, Any]:
        """Return the record for JSON."""
        own = {name: value for name, value in vars(self).items() if name != "slow"}
        return {**own, "ranks": list(self.ranks), **self.slow._asdict()}


def teams_of(split: "Parallel") -> list[list[Unit]]:
    """Return the teams of a split; without data-parallel ranks there are none."""
    if split.data < 2:
        return []
    width = split.tensor
    of_stage = [range(stage * split.data, (stage + 1) * split.data) for stage in range(split.pipe)]
    return [[tuple(range(unit * width, (unit + 1) * width)) for unit in units] for units in of_stage]


def suspects_in(window: Window, teams: Sequence[Team]) -> dict[Unit, Slowness]:
    """Return the units that are suspect in one window."""
    found: dict[Unit, Slowness] = {}
    for team in teams:
        present = {unit: _joint([window[rank] for rank in unit]) for unit in team if window.keys() >= {*unit}}
        if len(present) >= max(2.0, PRESENT * len(team)):
            found |= _suspects_of(present)
    return found


def persistent(verdicts: Sequence[Verdicts], named: Collection[Unit] = ()) -> dict[Unit, Slowness]:
    """Return the persistently slow units, from the verdicts on consecutive windows, oldest first.

    `named`: the units that were persistently slow before.
    """
    newest = verdicts[-WINDOWS:]
    found = {}
    for unit in set().union(*newest):
        suspect = [each[unit] for each in newest if unit in each]
        slow = _over(suspect)
        is_slow = slow.own_s >= SLOW * slow.usual_s and slow.least_s >= LEAST * slow.usual_s
        is_new = len(suspect) == WINDOWS and is_slow and slow.deviations >= OUTLIER
        if is_new or (unit in named and 2 * len(suspect) >= len(newest)):
            found[unit] = slow
    return found


def stragglers_of(
    found: Mapping[Unit, Slowness], teams: Sequence[Team], places: Mapping[int, Place]
) -> list[Straggler]:
    """Name slow units, the slowest first. If all judged ranks of a node or GPU are slow, name it instead of them."""
    slow = {rank: unit for unit in found for rank in unit}
    judged = {rank for team in teams for unit in team for rank in unit}
    left, stragglers = dict.fromkeys(found), list[Straggler]()
    for kind in ("node", "gpu"):
        for place, ranks in _by(kind, places, judged).items():
            units = list(dict.fromkeys(slow[rank] for rank in ranks if rank in slow))
            if sorted(rank for unit in units for rank in unit) == ranks and left.keys() >= {*units}:
                stragglers.append(_straggler(kind, place, ranks, [found[unit] for unit in units]))
                left = {unit: None for unit in left if unit not in units}
    for unit in left:
        where = {places.get(rank) for rank in unit}
        kind = "rank" if len(unit) == 1 else "ranks"
        stragglers.append(_straggler(kind, where.pop() if len(where) == 1 else None, unit, [found[unit]]))
    return sorted(stragglers, key=lambda each: -each.slow.own_s / each.slow.usual_s)


# Windows --------------------------------------------------------------------------------------------------------------


def _joint(paces: Sequence[RankPace]) -> RankPace:
    """Return the pace of a unit: that of its slowest rank, for which the others wait within a step."""
    return max(paces, key=lambda each: each.own_s)


def _suspects_of(team: Mapping[Unit, RankPace]) -> dict[Unit, Slowness]:
    times = sorted(pace.own_s for pace in team.values())
    bound = ABOVE * times[(len(times) - 2) // 2]  # no unit below it can be suspect: the others' median is not smaller
    suspects = sorted((unit for unit in team if team[unit].own_s >= bound), key=lambda unit: -team[unit].own_s)
    verdicts = ((unit, _judge(team[unit], [team[each] for each in team if each != unit])) for unit in suspects[:MOST])
    return {unit: slow for unit, slow in verdicts if slow is not None}


def _judge(pace: RankPace, others: Sequence[RankPace]) -> Slowness | None:
    scaled = [other.own_s * _share(pace, other) for other in others]
    usual_s, waits_s = median(scaled), median(other.waits_s for other in others) - pace.waits_s
    spread_s = DEVIATION * median(abs(each - usual_s) for each in scaled)
    excess_s = pace.own_s - usual_s
    if pace.own_s < ABOVE * usual_s or waits_s < excess_s / 2:
        return None
    excess = [own - median(other.parts_s[at] for other in others) for at, own in enumerate(pace.parts_s)]
    part = PARTS[excess.index(max(excess))]
    deviations = min(MOST_DEVIATIONS, excess_s / spread_s) if spread_s else MOST_DEVIATIONS
    return Slowness(pace.own_s, pace.least_s, usual_s, waits_s, part, pace.first, pace.last, deviations)


def _share(pace: RankPace, other: RankPace) -> float:
    """Return how much longer `pace` may take than `other` because it has more samples."""
    return max(1.0, pace.samples / other.samples) if pace.samples and other.samples else 1.0


def _over(slow: Sequence[Slowness]) -> Slowness:
    """Combine the suspicions of several windows, or on several units."""
    parts = [each.part for each in slow]
    return Slowness(
        own_s=median(each.own_s for each in slow),
        least_s=median(each.least_s for each in slow),
        usual_s=median(each.usual_s for each in slow),
        waits_s=median(each.waits_s for each in slow),
        part=max(parts, key=parts.count),
        first_step=min(each.first_step for each in slow),
        last_step=max(each.last_step for each in slow),
        deviations=median(each.deviations for each in slow),
    )


# Names ----------------------------------------------------------------------------------------------------------------


def _by(kind: str, places: Mapping[int, Place], judged: Collection[int]) -> dict[Place, list[int]]:
    """Group the judged ranks by node or by GPU. Ranks without a GPU are not in a group of a GPU."""
    groups: dict[Place, list[int]] = {}
    for rank in sorted(judged & places.keys()):
        place = places[rank]
        if kind == "node":
            groups.setdefault(Place(place.node, place.host), []).append(rank)
        elif place.gpu is not None:
            groups.setdefault(place, []).append(rank)
    return groups


def _straggler(kind: str, place: Place | None, ranks: Sequence[int], slow: Sequence[Slowness]) -> Straggler:
    node, host, gpu = (None, "", None) if place is None else (place.node, place.host, place.gpu)
    return Straggler(kind, node, host, None if kind == "node" else gpu, tuple(sorted(ranks)), _over(slow))
