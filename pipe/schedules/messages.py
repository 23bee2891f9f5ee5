"""Insert sends and receives between a schedule's actions, in an order that cannot deadlock.

    rank 0   F0.0 >a1.0 F0.1 >a1.1 <g0.0 B0.0 <g0.1 B0.1        >a1.0  send: the activation for stage 1, micro-batch 0
    rank 1   <a1.0 F1.0 B1.0 >g0.0 <a1.1 F1.1 B1.1 >g0.1        <g0.0  receive: the gradient for stage 0

The order is that of an execution in which every send blocks until it is received, as it may with NCCL. A rank runs
until it needs a tensor from another rank or has produced one for another; then the two exchange it. So the program is
itself an execution without a deadlock, even if sends block, and tensors between two ranks arrive in the order in which
they are sent. A send directly follows its producer. A receive directly precedes its consumer, or comes earlier if the
sender must first continue. An executor may post the receive at that place, and wait for the message only at the
consumer.
"""

from collections import deque

from muster.pipe.schedules.actions import Action, Schedule, ScheduleError
from muster.pipe.schedules.checks import check_actions
from muster.pipe.schedules.programs import Program, Receive, Send, Step, received_before, sent_after
from muster.pipe.schedules.times import needs


def with_messages(schedule: Schedule) -> Program:
    """Insert each send after its producer and each receive where it is needed, without a deadlock.

    Raises:
        ScheduleError: If the schedule is incomplete, or its ranks deadlock whatever the order of messages.
    """
    check_actions(schedule)
    rendezvous = _Rendezvous(schedule)
    rendezvous.advance()
    while not rendezvous.over():
        rendezvous.hoist()
        rendezvous.advance()
    return Program(schedule, tuple(tuple(row) for row in rendezvous.steps))


class _Rendezvous:
    """An execution of a schedule with blocking sends, which collects the messages it needs."""

    def __init__(self, schedule: Schedule) -> None:
        self.name, self.rank_of = schedule.name, schedule.rank_of
        self.left: list[deque[Action | Send]] = []  # the remaining steps of each rank
        for row in schedule.actions:
            both = ((action, sent_after(action, self.rank_of)) for action in row)
            self.left.append(deque(step for pair in both for step in pair if step is not None))
        self.steps: list[list[Step]] = [[] for _ in schedule.actions]
        self.done: set[Action] = set()
        self.received: set[Receive] = set()
        self.to_try = deque(range(len(self.left)))  # ranks that may be able to continue

    def over(self) -> bool:
        """Return whether all steps are done."""
        return not any(self.left)

    def advance(self) -> None:
        """Run all steps that are possible while each receive directly precedes its consumer."""
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
        """Receive a message if its sender is blocked in the send."""
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
        """Mark the receiver of a rank's next send as able to continue."""
        if self.left[rank] and isinstance(send := self.left[rank][0], Send):
            self.to_try.append(send.peer)

    def hoist(self) -> None:
        """Break a ring of waiting ranks by an early receive; prefer activations, then the oldest micro-batch."""
        ring = self._ring()
        sends = [(step, rank) for rank in ring if isinstance(step := self.left[rank][0], Send)]
        if not sends:
            where = ", ".join(f"rank {rank} before {self.left[rank][0]}" for rank in ring)
            raise ScheduleError(f"schedule {self.name}: ranks deadlock: {where}")
        send, sender = min(sends, key=lambda each: (each[0].what, each[0].microbatch, each[0].stage))
        self._take(send.peer, Receive(send.what, send.stage, send.microbatch, sender))

    def _ring(self) -> list[int]:
        """Follow the ranks that wait for each other until one occurs twice; return the ring."""
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
