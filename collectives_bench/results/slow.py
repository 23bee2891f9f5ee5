"""Find slow nodes and links from the times of all pairs, with the evidence, or report that they cannot be found. Pure.

Every directed link a → b has a time. In a healthy network, all times are near one level. A slow part multiplies this
level by a ratio:

    log time(a → b) = level + max(sends(a), receives(b), link(a → b))        all three >= 0, nearly all of them 0

This is a maximum, not a sum, because the slowest part of a message's route determines its time. So

    level        the median of links without a culprit, found iteratively from the fastest quarter of all links
    sends(a)     the level of a's fastest outgoing links, because a slow node is slow to all others
    link(a → b)  the slowness that neither node explains

A culprit is named if its slowness exceeds THRESHOLD and several times the noise, in nearly every launch. If a part is
slow enough, but not in nearly every launch, the report only advises to measure again.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final, Literal

from muster.collectives_bench.records import Pair, SampleTimes
from muster.jobs.measuring.stats import median_interval, quantile

THRESHOLD: Final = math.log(1.15)  # log of the time ratio: 15 % slower
SURE: Final = THRESHOLD / 3  # the low end of a culprit's interval must be at least this
TIMES_NOISE: Final = 2.5
NOISY: Final = THRESHOLD / 2  # with more noise, a slowdown at the threshold could not be seen
FAST_SHARE: Final = 0.25  # the first estimate of the normal level is this quantile of all links
NODE_SHARE: Final = 0.2  # share of a slow node's links that may be fast by chance
STEPS: Final = 10
# With fewer than five medians, half of their range is multiplied by this factor, which gives an interval of about 90 %.
WIDENED: Final = {1: 0.0, 2: 3.0, 3: 1.6, 4: 1.2}
MANY: Final = 0.34  # if at least this share of pairs is slow, they are not reported as single links

Direction = Literal["both", "sends", "receives"]
Link = tuple[int, int]


@dataclass(frozen=True)
class Slow:
    """One slow node or link.

    `ratio` is its time divided by the healthy level. `nodes` has one node, or the two ends of a link.
    """

    kind: Literal["node", "link"]
    nodes: tuple[int, ...]
    hosts: tuple[str, ...]
    direction: Direction  # for a link: "both", or "sends" (only from the first node to the second)
    ratio: float
    low: float  # low end of the interval of `ratio`
    gb_per_s: float
    healthy_gb_per_s: float

    @property
    def line(self) -> str:
        """Describe the slow part in one line, with the evidence."""
        share = 1 - 1 / self.ratio
        evidence = f"{self.gb_per_s:.3g} GB/s, {share:.0%} less than the {self.healthy_gb_per_s:.3g} GB/s of the others"
        sure = f" ({max(0.0, 1 - 1 / self.low):.0%} at the low end of its interval)"
        if self.kind == "node":
            name = f"node {self.nodes[0]} ({self.hosts[0]})"
            way = {"both": "all its links", "sends": "outgoing links", "receives": "incoming links"}[self.direction]
            return f"slow node: {name}, {way}, {evidence}{sure}"
        arrow = "↔" if self.direction == "both" else "→"
        name = f"{self.hosts[0]} {arrow} {self.hosts[1]} (nodes {self.nodes[0]} and {self.nodes[1]})"
        return f"slow link: {name}, {evidence}{sure}"


@dataclass(frozen=True)
class Findings:
    """The result of all pairs.

    `undecided` is the reason why some nodes or links cannot be judged; "" if all can be judged.
    """

    slow: tuple[Slow, ...]
    noise: float  # half of the relative width of a link's interval; the median over links
    undecided: str

    def lines(self) -> list[str]:
        """Return one line for each slow part and for `undecided`. If nothing is slow, return one line that says so."""
        found = [each.line for each in self.slow]
        if self.undecided:
            return [*found, f"undecided: {self.undecided}"]
        return found or [f"no slow node or link (a slowdown of 15 % would be found; noise ±{self.noise:.1%})"]


@dataclass(frozen=True)
class _Seen:
    """The log time of one directed link, with its interval."""

    mid: float
    low: float
    high: float


def slow(pairs: Iterable[Pair]) -> Findings:
    """Find the slow nodes and links of one world from the pairs of all its launches."""
    good = [pair for pair in pairs if pair.state == "ok" and pair.there is not None and pair.back is not None]
    if not good:
        return Findings((), 0.0, "no pair was measured")
    seen = _seen(good)
    noise = median((each.high - each.low) / 2 for each in seen.values())
    hosts = _names(good)
    if len(hosts) == 2:
        return _two(seen, hosts, noise)
    model = _NetworkLevel(seen)
    culprits, doubtful = _judge(model, noise)
    if (
        noise > NOISY and len({pair.launch for pair in good}) == 1
    ):  # without a second launch, random variation can look like a slow link
        culprits, doubtful = [], [*culprits, *doubtful]
    nbytes = good[0].nbytes
    named = tuple(_named(each, hosts, model.level, nbytes) for each in culprits)
    return _summary(named, doubtful, model, hosts, noise)


@dataclass(frozen=True)
class _Effect:
    """The slowness of a part relative to the level, as a log ratio, and the low end of its interval."""

    nodes: tuple[int, ...]
    direction: Direction
    mid: float
    low: float


class _NetworkLevel:
    """The level of a network, and the time that each node adds to it."""

    def __init__(self, seen: Mapping[Link, _Seen]) -> None:
        self.seen = seen
        self.nodes = sorted({node for link in seen for node in link})
        self.level = quantile([each.mid for each in seen.values()], FAST_SHARE)
        for _ in range(STEPS):  # the iteration converges after two or three steps
            explained = self._slow_links()
            rest = [each.mid for link, each in seen.items() if link not in explained]
            if not rest or (settled := median(rest)) == self.level:
                break
            self.level = settled

    def side(self, node: int, direction: Direction) -> _Effect:
        """Return the log time that a node adds to everything that it sends or receives."""
        end = 0 if direction == "sends" else 1
        links = [each for link, each in self.seen.items() if link[end] == node]
        return _Effect(
            (node,),
            direction,
            _lower([each.mid for each in links]) - self.level,
            _lower([each.low for each in links]) - self.level,
        )

    def _slow_links(self) -> set[Link]:
        """List the links that are slow or have a slow node, relative to the current estimate of the level."""
        sends = {node for node in self.nodes if self.side(node, "sends").mid >= THRESHOLD}
        receives = {node for node in self.nodes if self.side(node, "receives").mid >= THRESHOLD}
        return {
            link
            for link, each in self.seen.items()
            if link[0] in sends or link[1] in receives or each.mid - self.level >= THRESHOLD
        }


def _judge(model: _NetworkLevel, noise: float) -> tuple[list[_Effect], list[_Effect]]:
    """Return certain and doubtful culprits. A link is judged by the slowness that neither of its nodes explains."""
    sure: list[_Effect] = []
    doubtful: list[_Effect] = []
    floor: dict[tuple[int, Direction], float] = {}
    for node in model.nodes:
        sides = [model.side(node, direction) for direction in ("sends", "receives")]
        _sort_out(_merged(sides), noise, sure, doubtful)
        floor.update({(node, side.direction): max(side.mid, 0.0) for side in sides if side.mid >= THRESHOLD})
    for one, other in ((one, other) for one in model.nodes for other in model.nodes if one < other):
        ways = []
        for link in ((one, other), (other, one)):
            each = model.seen.get(link)
            if each is not None:
                base = model.level + max(floor.get((link[0], "sends"), 0.0), floor.get((link[1], "receives"), 0.0))
                ways.append(_Effect(link, "sends", each.mid - base, each.low - base))
        _sort_out(_merged(ways), noise, sure, doubtful)
    return sure, doubtful


def _merged(sides: Sequence[_Effect]) -> list[_Effect]:
    """Merge a node's two slow directions into one effect, and drop effects that are not slow."""
    large = [side for side in sides if side.mid >= THRESHOLD]
    if len(large) < 2:
        return large
    first, second = large
    both = replace(first, nodes=tuple(sorted(first.nodes)), direction="both")
    return [replace(both, mid=(first.mid + second.mid) / 2, low=min(first.low, second.low))]


def _sort_out(effects: Iterable[_Effect], noise: float, sure: list[_Effect], doubtful: list[_Effect]) -> None:
    for each in effects:
        is_sure = each.low >= SURE and each.mid >= TIMES_NOISE * noise
        (sure if is_sure else doubtful).append(each)


def _summary(
    named: tuple[Slow, ...], doubtful: Sequence[_Effect], model: _NetworkLevel, hosts: Mapping[int, str], noise: float
) -> Findings:
    """Build the findings, with the reasons for doubt. Many slow links are reported together."""
    count = len(model.nodes) * (len(model.nodes) - 1) / 2
    links = [each for each in named if each.kind == "link"]
    if len(links) > MANY * count and len(links) > 2:
        groups = " | ".join(", ".join(hosts[node] for node in group) for group in _groups(model.nodes, links))
        text = f"{len(links)} of {count:.0f} pairs are slow, too many for single links; fast groups are {groups}"
        return Findings(tuple(each for each in named if each.kind == "node"), noise, text)
    reasons = []
    if fast := sorted(link for link, each in model.seen.items() if each.high <= model.level - THRESHOLD):
        first = " → ".join(hosts[node] for node in fast[0])
        reasons.append(f"{first} is faster than most links: these nodes are near each other, or most others are slow")
    if doubtful and noise <= NOISY:  # because noise makes every node look suspicious
        suspects = ", ".join(" - ".join(hosts[node] for node in each.nodes) for each in doubtful[:4])
        reasons.append(f"{suspects} seem{'s' if len(doubtful) == 1 else ''} slow, but not in every launch")
    if noise > NOISY:
        reasons.append(f"a link's times vary by ±{noise:.0%}, which can hide a slowdown of 15 %")
    if reasons:
        reasons.append("measure again on quiet hosts, or with more launches")
    return Findings(named, noise, "; ".join(reasons))


def _groups(nodes: Sequence[int], slow_links: Iterable[Slow]) -> list[list[int]]:
    """Return groups of nodes that are joined by fast links."""
    cut = {each.nodes for each in slow_links}
    groups: list[list[int]] = []
    for node in nodes:
        joined = [group for group in groups if any((min(node, one), max(node, one)) not in cut for one in group)]
        groups = [group for group in groups if group not in joined]
        groups.append(sorted([node, *(each for group in joined for each in group)]))
    return sorted(groups)


def _two(seen: Mapping[Link, _Seen], hosts: Mapping[int, str], noise: float) -> Findings:
    """Compare the two directions, which is the only comparison possible with two nodes."""
    (one, other), (there, back) = sorted(hosts), [seen[link] for link in sorted(seen)]
    text = "two nodes do not show whether the link or a node is slow; add a third node"
    slower, faster, ends = (there, back, (one, other)) if there.mid > back.mid else (back, there, (other, one))
    if slower.mid - faster.mid >= THRESHOLD and slower.low > faster.high:
        ratio = math.exp(slower.mid - faster.mid)
        way = f"{hosts[ends[0]]} → {hosts[ends[1]]} takes {ratio:.2f} x as long as the opposite direction"
        text = f"{way}: the first node sends slowly, or the second node receives slowly; {text}"
    return Findings((), noise, text)


def _names(pairs: Iterable[Pair]) -> dict[int, str]:
    """Return the name of each node: its host if hosts are unique."""
    hosts = {node: host for pair in pairs for node, host in zip(pair.nodes, pair.hosts, strict=True)}
    return hosts if len(set(hosts.values())) == len(hosts) else {node: f"node {node}" for node in hosts}


def _seen(pairs: Sequence[Pair]) -> dict[Link, _Seen]:
    """Combine all launches of a directed link into the median of their medians, with its interval."""
    timings: dict[Link, list[SampleTimes]] = {}
    for pair in pairs:
        assert pair.there is not None
        assert pair.back is not None
        timings.setdefault(pair.nodes, []).append(pair.there)
        timings.setdefault((pair.nodes[1], pair.nodes[0]), []).append(pair.back)
    return {link: _joined(launches) for link, launches in timings.items()}


def _joined(launches: Sequence[SampleTimes]) -> _Seen:
    medians = [math.log(each.p50_us) for each in launches]
    low, high = median_interval(medians)
    mid = median(medians)
    if len(launches) in WIDENED:
        within = median(
            math.log(each.p50_us / each.low_us) for each in launches
        )  # because occasional delays lie only above the median
        half = max(WIDENED[len(launches)] * (high - low) / 2, within / math.sqrt(len(launches)))
        low, high = mid - half, mid + half
    return _Seen(mid, low, high)


def _lower(values: Sequence[float]) -> float:
    """Return the smallest value, after dropping the few values that may be small by chance."""
    return sorted(values)[math.floor((len(values) - 1) * NODE_SHARE)]


def _named(effect: _Effect, hosts: Mapping[int, str], level: float, nbytes: int) -> Slow:
    healthy = nbytes / math.exp(level) / 1e3  # bytes per microsecond -> GB/s
    return Slow(
        kind="node" if len(effect.nodes) == 1 else "link",
        nodes=effect.nodes,
        hosts=tuple(hosts[node] for node in effect.nodes),
        direction=effect.direction,
        ratio=math.exp(effect.mid),
        low=math.exp(effect.low),
        gb_per_s=healthy / math.exp(effect.mid),
        healthy_gb_per_s=healthy,
    )
