"""What one rank does in a step, as operations to be run first to last, and how a batch is cut into micro-batches.

    program   <a1.0   F1.0  >a2.0  ...          a receive may stand before its consumer needs it
    row       ask     wait  F1.0   send  ...    there it is asked for; what is waited for is the consumer's

A smaller batch has fewer micro-batches: the same schedule without the last ones. An evaluation is its forwards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from muster.pipe.schedules.actions import Action, Schedule
from muster.pipe.schedules.backlog import Way, backlogs
from muster.pipe.schedules.messages import check, with_messages
from muster.pipe.schedules.programs import Receive, Send, Step, received_before, sent_after

Kind = Literal["F", "B", "I", "W", "send", "ask", "wait"]


class Operation(NamedTuple):
    """One thing to do."""

    kind: Kind
    step: Step


class Row(NamedTuple):
    """A rank's operations, the messages that come to it, in their order, and how many may lie on each rank's ways."""

    operations: tuple[Operation, ...]
    receives: tuple[Receive, ...]
    backlogs: Mapping[Way, int]


def row_of(schedule: Schedule, rank: int, microbatches: int, *, forwards_only: bool = False) -> Row:
    """Return what a rank does for so many micro-batches, at most the schedule's.

    Raises:
        ScheduleError: it does not do all of a step, once, in an order that can be.
    """
    actions = tuple(tuple(each for each in row if each.microbatch < microbatches) for row in schedule.actions)
    if forwards_only:
        ranks = [_forwards(each, schedule.rank_of) for each in actions]
        coming = tuple(each for peer, steps in enumerate(ranks) for each in _coming(steps, peer, rank))
        return Row(tuple(_operations(ranks[rank], schedule)), coming, backlogs(ranks))
    program = with_messages(replace(schedule, microbatches=microbatches, actions=actions))
    check(program)
    steps = program.steps[rank]
    coming = tuple(each for each in steps if isinstance(each, Receive))
    return Row(tuple(_operations(steps, schedule)), coming, backlogs(program.steps))


def _forwards(actions: Sequence[Action], rank_of: tuple[int, ...]) -> tuple[Step, ...]:
    """Do forwards in their order, each between what it needs and what it makes: nothing comes back."""
    forwards = (each for each in actions if each.kind == "F")
    steps = ((received_before(each, rank_of), each, sent_after(each, rank_of)) for each in forwards)
    return tuple(step for each in steps for step in each if step is not None)


def _coming(steps: Sequence[Step], peer: int, rank: int) -> list[Receive]:
    """List what a peer sends to a rank, in its order."""
    sends = [each for each in steps if isinstance(each, Send) and each.peer == rank]
    return [Receive(each.what, each.stage, each.microbatch, peer) for each in sends]


def _operations(steps: Sequence[Step], schedule: Schedule) -> list[Operation]:
    operations = []
    for step in steps:
        if isinstance(step, Action):
            if received := received_before(step, schedule.rank_of):
                operations.append(Operation("wait", received))
            operations.append(Operation(step.kind, step))
        else:
            operations.append(Operation("send" if isinstance(step, Send) else "ask", step))
    return operations


def part_lengths(samples: int, parts: int) -> list[int]:
    """Cut a batch into parts that differ by one sample at most, larger ones first; fewer, where samples are fewer."""
    parts = min(parts, samples)
    length, longer = divmod(samples, parts)
    return [length + (part < longer) for part in range(parts)]
