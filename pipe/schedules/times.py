"""When actions begin and end: every rank in its order, each action as soon as what it needs is there."""

from collections import deque
from dataclasses import dataclass

from muster.pipe.schedules.actions import Action, ScheduleError
from muster.pipe.schedules.costs import Costs
from muster.pipe.schedules.programs import Send, received_before, sent_after

Times = tuple[float, float]  # start and end in seconds, the first start of all at 0


@dataclass(frozen=True)
class Timed:
    """Times of every action, rank by rank, and of every message on its way, by the rank that sends it."""

    actions: tuple[tuple[Times, ...], ...]
    messages: tuple[tuple[tuple[Send, Times], ...], ...]


def needs(action: Action, stages: int) -> tuple[Action, ...]:
    """List what an action needs: a forward that of the stage before, W its I, a backward its forward and the next's."""
    stage, index = action.stage, action.microbatch
    if action.kind == "F":
        return (Action("F", stage - 1, index),) if stage else ()
    if action.kind == "W":
        return (Action("I", stage, index),)
    own = Action("F", stage, index)
    return (own,) if stage == stages - 1 else (own, Action(action.kind, stage + 1, index))


def times(rank_of: tuple[int, ...], orders: tuple[tuple[Action, ...], ...], costs: Costs) -> Timed:
    """Let every rank do its actions in order, each as soon as what it needs is there.

    A message leaves when its maker ends, and waits for the one before it on the same way from rank to rank. Its sender
    goes on when it has let it go, its receiver when it has taken it, which it may do while it waits.

    Raises:
        ScheduleError: Ranks wait for each other for ever, or for what nobody does.
    """
    stages = len(rank_of)
    arrived: list[dict[Action, float]] = [{} for _ in orders]  # when what an action made is on a rank
    free = [0.0 for _ in orders]
    way_free: dict[tuple[int, int], float] = {}
    rows: list[list[Times]] = [[] for _ in orders]
    sent: list[list[tuple[Send, Times]]] = [[] for _ in orders]
    to_try = deque(range(len(orders)))
    while to_try:
        rank = to_try.popleft()
        row, order, here = rows[rank], orders[rank], arrived[rank]
        while len(row) < len(order):
            action = order[len(row)]
            inputs = [here.get(each) for each in needs(action, stages)]
            start = free[rank]
            if costs.take and received_before(action, rank_of):
                start += costs.taking(action.stage)
            ready = [each for each in inputs if each is not None]
            if len(ready) < len(inputs):
                break
            start = max(start, *ready) if ready else start
            end = start + costs.of(action)
            row.append((start, end))
            here[action] = free[rank] = end
            if send := sent_after(action, rank_of):
                leaves = max(end, way_free.get((rank, send.peer), 0.0))
                arrives = leaves + costs.between(action.stage, send.stage)
                way_free[rank, send.peer] = arrived[send.peer][action] = arrives
                free[rank] = end + costs.sending(action.stage)
                sent[rank].append((send, (leaves, arrives)))
                to_try.append(send.peer)
    stuck = [(rank, order[len(rows[rank])]) for rank, order in enumerate(orders) if len(rows[rank]) < len(order)]
    if stuck:
        where = ", ".join(f"rank {rank} before {action}" for rank, action in stuck)
        raise ScheduleError(f"schedule stops for ever: {where}; each waits for an action that is not done before")
    return Timed(tuple(tuple(row) for row in rows), tuple(tuple(row) for row in sent))
