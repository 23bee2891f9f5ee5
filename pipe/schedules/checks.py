"""Prove that a schedule and its program are correct: every action once, messages in order, and no deadlock."""

from collections import Counter, defaultdict, deque
from itertools import pairwise

from muster.pipe.schedules.actions import Action, Kind, Schedule, ScheduleError
from muster.pipe.schedules.programs import Program, Receive, Send, Step, received_before, sent_after


def check_actions(schedule: Schedule) -> None:
    """Prove that a schedule runs every action of a step once, in an order that gives the bits of a micro-batch loop.

    Raises:
        ScheduleError: If an action is missing, repeated, on the wrong rank, or before an earlier micro-batch of its
            stage; or a stage has both whole and split backwards.
    """
    done = Counter(action for row in schedule.actions for action in row)
    if twice := [action for action, times in done.items() if times > 1]:
        raise ScheduleError(f"schedule {schedule.name}: {twice[0]} occurs {done[twice[0]]} times, expected once")
    _check_places(schedule)
    places: list[dict[Action, int]] = [{} for _ in range(schedule.stages)]
    for row in schedule.actions:
        for place, action in enumerate(row):
            places[action.stage][action] = place
    for stage, position in enumerate(places):
        _check_stage(schedule, stage, position)


def _check_places(schedule: Schedule) -> None:
    stages, microbatches = schedule.stages, schedule.microbatches
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if not (0 <= action.stage < stages and 0 <= action.microbatch < microbatches):
                limits = f"{stages} stages and {microbatches} micro-batches"
                raise ScheduleError(f"schedule {schedule.name}: rank {rank} runs {action}, but there are {limits}")
            if schedule.rank_of[action.stage] != rank:
                owner = schedule.rank_of[action.stage]
                raise ScheduleError(
                    f"schedule {schedule.name}: rank {rank} runs {action}, but rank {owner} has that stage"
                )


def _check_stage(schedule: Schedule, stage: int, position: dict[Action, int]) -> None:
    rank = schedule.rank_of[stage]
    split = any(action.kind in ("I", "W") for action in position)
    kinds: tuple[Kind, ...] = ("F", "I", "W") if split else ("F", "B")
    for kind in kinds:
        for index in range(schedule.microbatches):
            if Action(kind, stage, index) not in position:
                raise ScheduleError(f"schedule {schedule.name}: rank {rank} never runs {kind}{stage}.{index}")
    if extra := [action for action in position if action.kind not in kinds]:
        raise ScheduleError(f"schedule {schedule.name}: stage {stage} runs {extra[0]}, but splits its other backwards")
    count = schedule.microbatches
    pairs = []
    for kind in kinds:
        order = range(count) if kind == "F" else schedule.backward_order(count)
        pairs += [(Action(kind, stage, one), Action(kind, stage, other)) for one, other in pairwise(order)]
    for first, second in pairwise(kinds):
        pairs += [(Action(first, stage, index), Action(second, stage, index)) for index in range(count)]
    for before, after in pairs:
        if position[before] > position[after]:
            places = f"{position[after]} and {position[before]}"
            raise ScheduleError(
                f"schedule {schedule.name}: rank {rank} runs {after} before {before} (places {places}); swap them"
            )


def check(program: Program) -> None:
    """Prove that a program ends and gives correct results with any timing, even if sends block.

    Raises:
        ScheduleError: If the schedule is not valid; a message is missing, repeated, before its producer, after its
        consumer, or to a wrong rank; messages from one rank to another are received in a different order than sent; or
        the ranks deadlock when every send blocks until it is received.
    """
    check_actions(program.schedule)
    _check_messages(program)
    _check_ways(program)
    _check_run(program)


def _check_messages(program: Program) -> None:
    """Check that every rank sends the result and receives the input of each action exactly once, and in time."""
    name, rank_of = program.schedule.name, program.schedule.rank_of
    if len(program.steps) != program.schedule.ranks:
        raise ScheduleError(f"program of {name} has {len(program.steps)} ranks, expected {program.schedule.ranks}")
    for rank, (steps, row) in enumerate(zip(program.steps, program.schedule.actions, strict=True)):
        where = f"program of {name}: rank {rank}"
        actions = tuple(step for step in steps if isinstance(step, Action))
        if actions != row:
            same = next(
                (place for place, pair in enumerate(zip(actions, row, strict=False)) if pair[0] != pair[1]), None
            )
            found = (
                f"{len(actions)} actions, expected {len(row)}"
                if same is None
                else f"{actions[same]}, expected {row[same]}"
            )
            raise ScheduleError(f"{where} differs from its schedule: it runs {found}")
        position: dict[Step, int] = {}
        for place, step in enumerate(steps):
            if step in position:
                raise ScheduleError(f"{where} has {step} twice, at places {position[step]} and {place}")
            position[step] = place
        wanted: set[Step] = set(row)
        for action in row:
            send, receive = sent_after(action, rank_of), received_before(action, rank_of)
            wanted |= {step for step in (send, receive) if step}
            if send and position.get(send, -1) < position[action]:
                raise ScheduleError(
                    f"{where} {_has(send, position)}; it must follow {action} (place {position[action]})"
                )
            if receive and not position.get(receive, len(steps)) < position[action]:
                raise ScheduleError(
                    f"{where} {_has(receive, position)}; it must precede {action} (place {position[action]})"
                )
        if extra := sorted(position.keys() - wanted, key=position.__getitem__):
            step = extra[0]
            raise ScheduleError(f"{where} {_has(step, position)}, which no action needs")


def _has(step: Step, position: dict[Step, int]) -> str:
    peer = f" (rank {step.peer})" if isinstance(step, (Send, Receive)) else ""
    return f"has {step}{peer} at place {position[step]}" if step in position else f"lacks {step}{peer}"


def _check_ways(program: Program) -> None:
    """Check that messages from one rank to another are received in the order in which they are sent."""
    sent: dict[tuple[int, int], list[Send]] = defaultdict(list)
    got: dict[tuple[int, int], list[Receive]] = defaultdict(list)
    for rank, steps in enumerate(program.steps):
        for step in steps:
            if isinstance(step, Send):
                sent[rank, step.peer].append(step)
            elif isinstance(step, Receive):
                got[step.peer, rank].append(step)
    for source, target in sorted(sent):
        for place, (send, receive) in enumerate(zip(sent[source, target], got[source, target], strict=False)):
            if send.key != receive.key:
                raise ScheduleError(
                    f"program of {program.schedule.name}: message {place} from rank {source} to rank "
                    f"{target} is sent as {send} but received as {receive}; sends and receives must have the same order"
                )


def _check_run(program: Program) -> None:
    """Execute a program one step at a time, with sends that block until they are received."""
    at = [0 for _ in program.steps]

    def step_of(rank: int) -> Step | None:
        return program.steps[rank][at[rank]] if at[rank] < len(program.steps[rank]) else None

    to_try = deque(range(len(at)))
    while to_try:
        rank = to_try.popleft()
        while isinstance(step_of(rank), Action):
            at[rank] += 1
        step = step_of(rank)
        if not isinstance(step, (Send, Receive)):
            continue
        other = step_of(step.peer)
        meets = isinstance(other, Receive) if isinstance(step, Send) else isinstance(other, Send)
        if meets and isinstance(other, (Send, Receive)) and other.peer == rank and step.key == other.key:
            at[rank] += 1
            at[step.peer] += 1
            to_try.extend((rank, step.peer))
    if stuck := [f"rank {rank} at {step_of(rank)} (place {at[rank]})" for rank in range(len(at)) if step_of(rank)]:
        raise ScheduleError(
            f"program of {program.schedule.name}: deadlock when sends block until they are received: {', '.join(stuck)}"
        )
