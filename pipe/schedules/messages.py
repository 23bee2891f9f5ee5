"""Sends and receives between a schedule's actions, in an order that cannot deadlock, and the proof of it.

    rank 0   F0.0 >a1.0 F0.1 >a1.1 <g0.0 B0.0 <g0.1 B0.1        >a1.0  send: the activation for stage 1, micro-batch 0
    rank 1   <a1.0 F1.0 B1.0 >g0.0 <a1.1 F1.1 B1.1 >g0.1        <g0.0  receive: the gradient for stage 0

The order is that of an execution in which every send waits until it is received, as messages of NCCL may: a rank runs
until it needs a tensor of another rank, or has made one for another; then the two meet. So the program itself is a run
without a deadlock, whatever sends do, and on each way from a rank to another tensors come in the order they are sent.
A send stands right after its maker. A receive stands where its consumer needs it, or before that where the sender's
next steps are needed first: there an executor may post it, and wait for it only at the consumer.
"""

from collections import deque

from muster.pipe.schedules.actions import Action, Schedule, ScheduleError
from muster.pipe.schedules.checks import check_actions
from muster.pipe.schedules.programs import Program, Receive, Send, Step, received_before, sent_after
from muster.pipe.schedules.times import needs


def with_messages(schedule: Schedule) -> Program:
    """Insert sends and receives: sends after their makers, receives where needed, in an order without a deadlock.

    Raises:
        ScheduleError: The schedule is not whole, or its ranks wait for each other in any order of messages.
    """
    check_actions(schedule)
    meetings = _Meetings(schedule)
    meetings.advance()
    while not meetings.over():
        meetings.hoist()
        meetings.advance()
    return Program(schedule, tuple(tuple(row) for row in meetings.steps))


class _Meetings:
    """A run of a schedule whose sends wait until they are received, with the messages that turned out to be needed."""

    def __init__(self, schedule: Schedule) -> None:
        self.name, self.rank_of = schedule.name, schedule.rank_of
        self.left: list[deque[Action | Send]] = []  # what each rank has still to do
        for row in schedule.actions:
            both = ((action, sent_after(action, self.rank_of)) for action in row)
            self.left.append(deque(step for pair in both for step in pair if step is not None))
        self.steps: list[list[Step]] = [[] for _ in schedule.actions]
        self.done: set[Action] = set()
        self.received: set[Receive] = set()
        self.to_try = deque(range(len(self.left)))  # ranks that may be able to go on

    def over(self) -> bool:
        """Tell whether all is done."""
        return not any(self.left)

    def advance(self) -> None:
        """Do all that can be done with no receive before its consumer."""
        while self.to_try:
            rank = self.to_try.popleft()
            left = self.left[rank]
            while left and isinstance(action := left[0], Action) and self._do(rank, action):
                pass

    def _do(self, rank: int, action: Action) -> bool:
        message = received_before(action, self.rank_of)
        if message and message not in self.received and not self._take(rank, message):
            return False
        if any(each not in self.done for each in self._own_needs(action)):
            return False
        self.steps[rank].append(action)
        self.done.add(action)
        self.left[rank].popleft()
        self._offer(rank)
        return True

    def _own_needs(self, action: Action) -> list[Action]:
        here = self.rank_of[action.stage]
        return [each for each in needs(action, len(self.rank_of)) if self.rank_of[each.stage] == here]

    def _take(self, rank: int, message: Receive) -> bool:
        """Receive a message if its sender waits with it."""
        offered = self.left[message.peer]
        if not offered or offered[0] != Send(message.what, message.stage, message.microbatch, rank):
            return False
        self.steps[message.peer].append(offered.popleft())
        self.steps[rank].append(message)
        self.received.add(message)
        self.to_try.append(message.peer)
        self._offer(message.peer)
        return True

    def _offer(self, rank: int) -> None:
        """Let the receiver try again that a rank has now a message for."""
        if self.left[rank] and isinstance(send := self.left[rank][0], Send):
            self.to_try.append(send.peer)

    def hoist(self) -> None:
        """Receive one message early, where ranks wait in a ring: activations first, then the oldest micro-batch."""
        ring = self._ring()
        sends = [(step, rank) for rank in ring if isinstance(step := self.left[rank][0], Send)]
        if not sends:
            where = ", ".join(f"rank {rank} before {self.left[rank][0]}" for rank in ring)
            raise ScheduleError(f"schedule {self.name}: ranks wait for each other for ever: {where}")
        send, sender = min(sends, key=lambda each: (each[0].what, each[0].microbatch, each[0].stage))
        self._take(send.peer, Receive(send.what, send.stage, send.microbatch, sender))

    def _ring(self) -> list[int]:
        """Follow who waits for whom until somebody comes a second time."""
        rank = next(rank for rank, left in enumerate(self.left) if left)
        seen: list[int] = []
        while rank not in seen:
            seen.append(rank)
            rank = self._waits_for(rank)
        return seen[seen.index(rank) :]

    def _waits_for(self, rank: int) -> int:
        step = self.left[rank][0]
        if isinstance(step, Send):
            return step.peer
        message = received_before(step, self.rank_of)
        return message.peer if message and message not in self.received else rank
