"""Compute when actions begin and end: ranks keep their order, and each action starts when its inputs have arrived."""

from collections import deque
from dataclasses import dataclass

from muster.pipe.schedules.actions import Action, ScheduleError
from muster.pipe.schedules.costs import Costs
from muster.pipe.schedules.programs import Send, received_before, sent_after

Times = tuple[float, float]  # start and end in seconds from the first start on any rank


@dataclass(frozen=True)
class ActionTimes:
    """The times of every action, by rank, and of every message in transit, by sending rank."""

    actions: tuple[tuple[Times, ...], ...]
    messages: tuple[tuple[tuple[Send, Times], ...], ...]


def needs(action: Action, stages: int) -> tuple[Action, ...]:
    """List an action's inputs.

    F needs the previous stage's F. W needs the I of the same stage. B and I need the F of the same stage and the next
    stage's B or I.
    """
    stage, index = action.stage, action.microbatch
    if action.kind == "F":
        return (Action("F", stage - 1, index),) if stage else ()
    if action.kind == "W":
        return (Action("I", stage, index),)
    own = Action("F", stage, index)
    return (own,) if stage == stages - 1 else (own, Action(action.kind, stage + 1, index))


def times(rank_of: tuple[int, ...], orders: tuple[tuple[Action, ...], ...], costs: Costs) -> ActionTimes:
    """Compute the times of all actions.

    A message leaves when its producer ends, after earlier messages between the same two ranks. The sender continues
    after handing the message over, and the receiver after accepting it. The time to accept a message overlaps the wait
    for it.

    Raises:
        ScheduleError: If the ranks deadlock, or an action needs the result of a missing one.
    """
    stages = len(rank_of)
    arrived: list[dict[Action, float]] = [{} for _ in orders]  # by rank: when an action's result arrives
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
        raise ScheduleError(f"schedule never ends: {where}; each waits for an action that never completes")
    return ActionTimes(tuple(tuple(row) for row in rows), tuple(tuple(row) for row in sent))
