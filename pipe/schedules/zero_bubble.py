"""Order the actions of zb1p and zbv: split backwards, whose weight gradients (W) fill the bubble.

Qi et al. 2024, "Zero bubble pipeline parallelism" (ZB-H1) and "Pipeline parallelism with controllable memory" (V-ZB).
The papers' orders assume F = I = W; here they are optimized for any costs. zb1p is 1F1B with each W some micro-batches
after its I. zbv is list scheduling in simulated time: a free rank takes the most urgent action that is ready.
It runs a forward only if it has room for the activation, and W only if nothing else can run or memory is full.
The best priorities depend on costs, so several rules are tried and the order with the shortest step wins. The result
depends only on sums, products and comparisons of the given numbers, so every rank finds the same order.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from muster.pipe.schedules.actions import Action, Kind
from muster.pipe.schedules.costs import Costs
from muster.pipe.schedules.times import times

Orders = tuple[tuple[Action, ...], ...]

TYPICAL = Costs(1.0, 1.2, 0.6, 0.2)  # roughly the costs of GPT blocks on CPUs
MANY_ACTIONS = 20_000  # for longer schedules only one order is tried, because comparing orders would take seconds


@dataclass(frozen=True)
class Rules:
    """Priorities among the actions that a rank could take.

    `in_flight` bounds the micro-batches of a rank between their F and their W. `first` is the preferred kind, F or I.
    Between the I or W of two stages, `oldest` prefers the older micro-batch; otherwise the later stage wins. Between
    the F of two stages, the later stage wins; with `alternate`, the stage that did not run last wins. With
    two stages per rank, `through` limits how many micro-batches have left the first stage but not begun the second
    one. The limit is d // `through` + 2, where d is the difference of the stage numbers; it applies after the first I
    of the second stage. Forwards beyond the limit have lower priority than W. A rank waits for an input in transit
    instead of running W if the input will arrive within `patience` times the duration of W.
    """

    in_flight: int
    first: Kind = "I"
    alternate: bool = False
    oldest: bool = True
    through: int = 0
    patience: float = 0.0


def one_chunk(rank_of: tuple[int, ...], ranks: int, microbatches: int, costs: Costs) -> Orders:
    """Order zb1p. A rank may hold as many activations as the first rank of 1F1B, each until its W.

    Up to `MANY_ACTIONS`, 1F1B with each W directly after its I is also tried, so that in simulated time zb1p is never
    slower than 1F1B.
    """
    after = [tuple(range(ranks)), tuple((rank + 1) // 2 for rank in range(ranks)), (0,) * ranks]
    drawn = (_h1(ranks, microbatches, each) for each in after)
    listed = (_listed(rank_of, microbatches, costs, rules) for rules in (Rules(ranks, patience=0.5),))
    return _shortest(chain(drawn, listed), rank_of, costs)


def two_chunks(rank_of: tuple[int, ...], ranks: int, microbatches: int, costs: Costs) -> Orders:
    """Order zbv. A rank may hold 2 * ranks activations, each until its W. Stages are half as large as in zb1p.

    For costs other than F = I = W, the order for F = I = W is also a candidate. For F = I = W, orders for `TYPICAL`
    are candidates: many orders are equally short at F = I = W, but some get much longer if costs change a little.
    """
    tried = (
        Rules(2 * ranks, first="F", alternate=True, through=2),
        Rules(2 * ranks, first="F", patience=0.5),
        Rules(2 * ranks, first="I", alternate=True, through=2),
        Rules(2 * ranks, first="F", alternate=True, through=2, oldest=False),
    )
    orders = (_listed(rank_of, microbatches, costs, rules) for rules in tried)
    if costs == Costs():
        often = (_listed(rank_of, microbatches, TYPICAL, rules) for rules in tried)
        return _shortest(chain(orders, often), rank_of, costs, TYPICAL)
    alike = (two_chunks(rank_of, ranks, microbatches, each) for each in (Costs(),))
    return _shortest(chain(orders, alike), rank_of, costs)


def _shortest(
    candidates: Iterable[Orders], rank_of: tuple[int, ...], costs: Costs, then: Costs | None = None
) -> Orders:
    """Choose the order with the shortest step for `costs`. Ties are broken by the costs in `then`.

    Stop early at an order with more than `MANY_ACTIONS` actions or, without `then`, at an optimal order.
    """
    best: tuple[tuple[float, float], Orders] | None = None
    for orders in candidates:
        if sum(map(len, orders)) > MANY_ACTIONS:
            return orders
        seconds = seconds_of(rank_of, orders, costs)
        found = seconds, 0.0 if then is None else seconds_of(rank_of, orders, then)
        if best is None or found < best[0]:
            best = found, orders
        if then is None and best[0][0] <= least_seconds(rank_of, orders, costs) * (1 + 1e-9):
            break
    assert best is not None
    return best[1]


def seconds_of(rank_of: tuple[int, ...], orders: Orders, costs: Costs) -> float:
    """Return the duration of a step."""
    return max(row[-1][1] for row in times(rank_of, orders, costs).actions)


def least_seconds(rank_of: tuple[int, ...], orders: Orders, costs: Costs) -> float:
    """Return a lower bound for these actions: each rank runs without a pause after its first micro-batch arrives."""
    arrives = [0.0]
    for stage in range(1, len(rank_of)):
        elsewhere = rank_of[stage] != rank_of[stage - 1]
        message_s = costs.between(stage - 1, stage) if elsewhere else 0.0
        arrives.append(arrives[-1] + costs.of(Action("F", stage - 1, 0)) + message_s)
    return max(arrives[rank_of.index(rank)] + sum(map(costs.of, order)) for rank, order in enumerate(orders))


def _h1(ranks: int, microbatches: int, after: Sequence[int]) -> Orders:
    """Order 1F1B with the W of rank r `after[r]` micro-batches after its I: with after[r] = r, the paper's ZB-H1."""
    return tuple(tuple(_h1_rank(stage, ranks, microbatches, after[stage])) for stage in range(ranks))


def _h1_rank(stage: int, ranks: int, microbatches: int, after: int) -> Iterator[Action]:
    forwards, weights = min(ranks - stage, microbatches), 0
    yield from (Action("F", stage, index) for index in range(forwards))
    for index in range(microbatches):
        yield Action("I", stage, index)
        if index >= after:
            yield Action("W", stage, weights)
            weights += 1
        if forwards < microbatches:
            yield Action("F", stage, forwards)
            forwards += 1
    yield from (Action("W", stage, index) for index in range(weights, microbatches))


def _listed(rank_of: tuple[int, ...], microbatches: int, costs: Costs, rules: Rules) -> Orders:
    """Order actions by list scheduling: whenever a rank is free, it takes the most urgent action that is ready."""
    listing = _Listing(rank_of, microbatches, costs, rules)
    listing.run()
    return tuple(tuple(order) for order in listing.orders)


class _Listing:
    """The state of list scheduling: how many actions each stage has begun, and when each action is ready."""

    def __init__(self, rank_of: tuple[int, ...], microbatches: int, costs: Costs, rules: Rules) -> None:
        stages = range(len(rank_of))
        ranks = range(max(rank_of) + 1)
        self.rank_of, self.costs, self.rules = rank_of, costs, rules
        self.chunks = [tuple(stage for stage in stages if rank_of[stage] == rank) for rank in ranks]
        self.begun: dict[Kind, list[int]] = {kind: [0 for _ in stages] for kind in ("F", "I", "W")}
        self.ready: dict[Kind, list[list[float]]] = {kind: [[] for _ in stages] for kind in ("F", "I", "W")}
        self.ready["F"][0] = [0.0] * microbatches
        self.free = [0.0 for _ in ranks]
        self.last_forward = [-1 for _ in ranks]
        self.orders: list[list[Action]] = [[] for _ in ranks]
        self.awake = [(0.0, rank) for rank in ranks]  # (time, rank): when a rank may be able to begin an action

    def run(self) -> None:
        """Begin all actions, in the order of simulated time."""
        while self.awake:
            now, rank = heapq.heappop(self.awake)
            if self.free[rank] <= now and (action := self._most_urgent(rank, now)):
                self._begin(action, rank, now)

    def _most_urgent(self, rank: int, now: float) -> Action | None:
        """Return the action that a rank should begin; None if none can run, or the rank should wait."""
        found, awaited = [], now
        for chunk, stage in enumerate(self.chunks[rank]):
            for kind, begun in self.begun.items():
                index, ready = begun[stage], self.ready[kind][stage]
                if index == len(ready) or (kind == "F" and not self._may_forward(rank, chunk)):
                    continue
                if ready[index] <= now:
                    found.append((self._urgency(kind, rank, chunk, index), Action(kind, stage, index)))
                elif kind != "W":
                    awaited = ready[index] if awaited == now else min(awaited, ready[index])
        if not found:
            return None
        action = min(found)[1]
        waits = now < awaited < now + self.rules.patience * self.costs.of(action)
        return None if action.kind == "W" and waits else action

    def _may_forward(self, rank: int, chunk: int) -> bool:
        """Return whether memory allows a forward.

        Memory for one activation is reserved for the last stage, to avoid a deadlock.
        """
        begun, stages = self.begun, self.chunks[rank]
        stage, last = stages[chunk], stages[-1]
        in_flight = sum(begun["F"][each] - begun["W"][each] for each in stages)
        reserved = 0 if stage == last or begun["F"][last] > begun["W"][last] else 1
        return in_flight + reserved < self.rules.in_flight

    def _urgency(self, kind: Kind, rank: int, chunk: int, index: int) -> tuple[int, ...]:
        """Return a sort key, lowest first.

        The key begins with 0 or 2 for F, 1 for I, 3 for W, and 4 for an F after W.
        """
        rules, stages = self.rules, self.chunks[rank]
        if kind != "F":
            return (1 if kind == "I" else 3), index if rules.oldest else 0, -chunk
        urgent = 0 if rules.first == "F" else 2
        if rules.through and chunk == 0 and self.begun["I"][stages[1]]:
            on_their_way = self.begun["F"][stages[0]] - self.begun["F"][stages[1]]
            if on_their_way >= (stages[1] - stages[0]) // rules.through + 2:
                urgent = 4
        if rules.alternate:
            return urgent, 0, int(self.last_forward[rank] == stages[chunk])
        return urgent, 0, -chunk

    def _begin(self, action: Action, rank: int, now: float) -> None:
        stage, end = action.stage, now + self.costs.of(action)
        self.begun[action.kind][stage] += 1
        self.orders[rank].append(action)
        if action.kind == "F":
            self.last_forward[rank] = stage
        self.free[rank] = end
        heapq.heappush(self.awake, (end, rank))
        if action.kind == "I":
            self._offer("W", stage, stage, end)
        if action.kind == "F" and stage == len(self.rank_of) - 1:
            self._offer("I", stage, stage, end)
        elif action.kind == "F":
            self._offer("F", stage + 1, stage, end)
        elif action.kind == "I" and stage:
            self._offer("I", stage - 1, stage, end)

    def _offer(self, kind: Kind, stage: int, maker: int, end: float) -> None:
        """Record when an action has all its inputs."""
        elsewhere = self.rank_of[stage] != self.rank_of[maker]
        at = end + self.costs.between(stage, maker) if elsewhere else end
        self.ready[kind][stage].append(at)
        heapq.heappush(self.awake, (at, self.rank_of[stage]))
