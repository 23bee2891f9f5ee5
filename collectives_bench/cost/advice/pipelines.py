"""The time of a pipeline's step, simulated from the costs of its actions.

Ranks that have a machine of their own take the fixed times of `pipe/schedules/times.py`. If all ranks share a machine,
an action is slower the more ranks compute at that moment:

    rank 0   F0 F0 F1 F1 F2 F3 . .          two ranks compute while the pipeline fills and drains,
    rank 1    .  . F0 F0 F1 F1 F2 F2        and four in between: their actions take longer
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from muster.pipe.schedules.actions import Action, Schedule
from muster.pipe.schedules.costs import Costs
from muster.pipe.schedules.programs import sent_after
from muster.pipe.schedules.tables import SCHEDULES, schedule
from muster.pipe.schedules.times import needs, times

Stretch = Callable[[int], float]  # number of computing ranks -> factor of their times
ENDED = 1e-12  # seconds
STEADY = 1  # micro-batches for each rank after which a step grows evenly


@dataclass(frozen=True)
class PipelineTimes:
    """A simulated step: its seconds, and for each rank the seconds in which it computes and the time of its end."""

    seconds: float
    busy_s: tuple[float, ...]
    ends_s: tuple[float, ...]


@dataclass(frozen=True)
class PipelineTask:
    """A schedule with the costs of its stages, as tuples so that equal tasks are simulated once."""

    name: str
    ranks: int
    microbatches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    message: tuple[float, ...]
    slices: int = 1
    halves: tuple[float, float] = (0.5, 0.5)  # of a backward: for inputs and for weights
    ahead: tuple[float, ...] = ()  # by cut: by how much a message without a pause before it takes longer

    @property
    def chunks(self) -> int:
        """The number of stages on each rank."""
        return len(self.forward) // self.ranks

    def costs(self) -> Costs:
        """Return the costs for a simulation."""
        inputs, weights = (tuple(each * share for each in self.backward) for share in self.halves)
        return Costs(self.forward, inputs, weights, self.message)


@lru_cache(maxsize=4096)
def alone(task: PipelineTask) -> PipelineTimes:
    """Simulate a step of ranks that do not share a machine.

    After the first micro-batches the busiest rank never waits, so each further one adds its work on that rank.
    """
    few = STEADY * task.ranks
    if task.microbatches > few:
        first = alone(replace(task, microbatches=few))
        times_more = task.microbatches / few
        more_s = max(first.busy_s) * (times_more - 1)
        worked = tuple(each * times_more for each in first.busy_s)
        return PipelineTimes(first.seconds + more_s, worked, tuple(each + more_s for each in first.ends_s))
    table = _table(task)
    costs = task.costs()
    found = times(table.rank_of, table.actions, costs)
    busy = tuple(sum(end - start for start, end in row) for row in found.actions)
    ends = tuple(row[-1][1] for row in found.actions)
    return PipelineTimes(max(ends), busy, ends)


def shared(task: PipelineTask, stretch: Stretch, late: Stretch = lambda count: 0.0) -> PipelineTimes:
    """Simulate a step of ranks that share a machine.

    `stretch` maps the number of computing ranks to the factor of their times, and `late` to the seconds that a message
    waits until a thread of its receiver is scheduled.
    """
    table, costs = _table(task), task.costs()
    rank_of, orders = table.rank_of, table.actions
    arrived: list[set[Action]] = [set() for _ in orders]
    at, left = [0] * len(orders), dict[int, float]()  # the next action of a rank; work left of the running ones
    busy, ends = [0.0] * len(orders), [0.0] * len(orders)
    out_free, in_free = [0.0] * len(orders), [0.0] * len(orders)  # a node's link, each way
    flying: list[tuple[float, int, int, Action]] = []  # messages by time of arrival
    now, sent = 0.0, 0
    while True:
        for rank, order in enumerate(orders):
            if rank not in left and at[rank] < len(order):
                action = order[at[rank]]
                if all(each in arrived[rank] for each in needs(action, len(rank_of))):
                    left[rank] = costs.of(action)
        if not left and not flying:
            break
        factor = stretch(len(left)) if left else 1.0
        next_s = min((now + work * factor for work in left.values()), default=float("inf"))
        until = min(next_s, flying[0][0]) if flying else next_s
        for rank in list(left):
            busy[rank] += until - now
            left[rank] -= (until - now) / factor
        now = until
        while flying and flying[0][0] <= now + ENDED:
            _, _, rank, action = heapq.heappop(flying)
            arrived[rank].add(action)
        for rank in [rank for rank, work in left.items() if work <= ENDED]:
            del left[rank]
            action = orders[rank][at[rank]]
            at[rank], ends[rank] = at[rank] + 1, now
            arrived[rank].add(action)
            if send := sent_after(action, rank_of):
                cut = min(action.stage, send.stage)
                ahead_s = task.ahead[cut] if task.ahead else 0.0
                begins = max(now - ahead_s, out_free[rank], in_free[send.peer])
                arrives = out_free[rank] = in_free[send.peer] = begins + ahead_s + task.message[cut]
                heapq.heappush(flying, (arrives + late(len(left)), sent, send.peer, action))
                sent += 1
    return PipelineTimes(max(ends), tuple(busy), tuple(ends))


@lru_cache(maxsize=512)
def _made(name: str, ranks: int, microbatches: int, chunks: int, slices: int) -> Schedule:
    return schedule(name, ranks, microbatches, chunks=chunks, slices=slices)


def _table(task: PipelineTask) -> Schedule:
    return _made(task.name, task.ranks, task.microbatches, task.chunks, task.slices)


def stage_ranks(name: str, ranks: int, chunks: int) -> Sequence[int]:
    """Return the rank of each stage."""
    return SCHEDULES[name].rank_of(ranks, chunks)
