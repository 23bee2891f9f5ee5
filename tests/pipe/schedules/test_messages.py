"""Programs: drawn examples, executions in any interleaving, and mutants that the checks must refuse."""

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.pipe.schedules.actions import Action, Schedule, ScheduleError
from muster.pipe.schedules.checks import check
from muster.pipe.schedules.messages import with_messages
from muster.pipe.schedules.programs import Program, Receive, Send, Step
from muster.pipe.schedules.simulate import simulate
from muster.pipe.schedules.tables import SCHEDULES, schedule

NAMES = st.sampled_from(sorted(SCHEDULES))
RANKS, MICROBATCHES, CHUNKS = st.integers(1, 8), st.integers(1, 12), st.integers(1, 3)


def program_of(name: str, ranks: int, microbatches: int, chunks: int = 2) -> Program:
    """Return a schedule with its messages."""
    return with_messages(schedule(name, ranks, microbatches, chunks=chunks))


def drawn(program: Program) -> list[str]:
    """Write a program as text."""
    return [" ".join(map(str, row)) for row in program.steps]


def changed(program: Program, rank: int, change: Callable[[list[Step]], object]) -> Program:
    """Return a program with one rank's steps changed."""
    steps = [list(row) for row in program.steps]
    change(steps[rank])
    return replace(program, steps=tuple(tuple(row) for row in steps))


def needs_it(action: Action, message: Receive) -> bool:
    """Return whether an action consumes a message."""
    kinds = "F" if message.what == "activation" else "BI"
    return action.kind in kinds and (action.stage, action.microbatch) == (message.stage, message.microbatch)


def reordered(table: Schedule, rank: int, order: str) -> Schedule:
    """Return a schedule with other actions on one rank, named as in `F0.1 B0.0`."""
    row = tuple(Action(word[0], *map(int, word[1:].split("."))) for word in order.split())  # type: ignore[arg-type]
    return replace(table, actions=(*table.actions[:rank], row, *table.actions[rank + 1 :]))


def run(program: Program, rng: random.Random, *, sends_wait: bool) -> int:
    """Run a program with ranks in random order and a FIFO queue per direction; return the number of steps.

    Contents are tracked: an action fails here if its input is not on its rank.
    """
    last = program.schedule.stages - 1
    at = [0] * len(program.steps)
    lines: dict[tuple[int, int], deque[tuple[str, int, int]]] = defaultdict(deque)
    held: list[set[tuple[str, int, int]]] = [set() for _ in program.steps]

    def head(rank: int) -> Step | None:
        return program.steps[rank][at[rank]] if at[rank] < len(program.steps[rank]) else None

    def step_once(rank: int) -> bool:
        step = head(rank)
        if isinstance(step, Send):
            tensor, other = (step.what, step.stage, step.microbatch), head(step.peer)
            if sends_wait and not (isinstance(other, Receive) and other.peer == rank):
                return False
            assert tensor in held[rank]
            lines[rank, step.peer].append(tensor)
        elif isinstance(step, Receive):
            if not lines[step.peer, rank]:
                return False
            assert lines[step.peer, rank].popleft() == (step.what, step.stage, step.microbatch)
            held[rank].add((step.what, step.stage, step.microbatch))
        elif isinstance(step, Action):
            kind, stage, index = step.kind, step.stage, step.microbatch
            if kind == "F":
                assert stage == 0 or ("activation", stage, index) in held[rank]
                held[rank] |= {("saved", stage, index), ("activation", stage + 1, index)}
            elif kind == "W":
                held[rank].remove(("inputs", stage, index))
            else:
                assert stage == last or ("gradient", stage, index) in held[rank]
                held[rank].remove(("saved", stage, index))
                held[rank] |= {("inputs", stage, index), ("gradient", stage - 1, index)}
        else:
            return False
        at[rank] += 1
        return True

    ranks = list(range(len(program.steps)))
    while True:
        rng.shuffle(ranks)
        moved = [step_once(rank) for rank in ranks]
        if not any(moved):
            return sum(at)


def test_a_send_follows_its_maker_and_a_receive_stands_where_it_is_needed() -> None:
    assert drawn(program_of("gpipe", 2, 2)) == [
        "F0.0 >a1.0 F0.1 >a1.1 <g0.0 B0.0 <g0.1 B0.1",
        "<a1.0 F1.0 <a1.1 F1.1 B1.0 >g0.0 B1.1 >g0.1",
    ]


def test_where_both_ranks_of_a_pair_send_one_of_them_receives_first() -> None:
    """Rank 0 sends a1.2 while rank 1 sends g0.1: if both blocked, they would deadlock."""
    assert drawn(program_of("1f1b", 2, 3)) == [
        "F0.0 >a1.0 F0.1 >a1.1 <g0.0 B0.0 F0.2 >a1.2 <g0.1 B0.1 <g0.2 B0.2",
        "<a1.0 F1.0 B1.0 <a1.1 >g0.0 F1.1 B1.1 <a1.2 >g0.1 F1.2 B1.2 >g0.2",
    ]


@settings(deadline=None, max_examples=15)
@given(NAMES, st.integers(1, 4), st.integers(1, 6))
def test_no_receive_stands_earlier_than_it_must(name: str, ranks: int, microbatches: int) -> None:
    """A receive that precedes other steps than its consumer cannot be moved directly before that."""
    program = program_of(name, ranks, microbatches)
    for rank, row in enumerate(program.steps):
        for place, step in enumerate(row):
            if not isinstance(step, Receive):
                continue
            consumer = next(at for at, each in enumerate(row) if isinstance(each, Action) and needs_it(each, step))
            if all(isinstance(each, Receive) for each in row[place:consumer]):
                continue
            with pytest.raises(ScheduleError, match=r"deadlock|the same order"):
                check(changed(program, rank, lambda row, a=place, b=consumer: row.insert(b - 1, row.pop(a))))


def test_stages_of_one_rank_send_each_other_nothing() -> None:
    assert drawn(program_of("zbv", 2, 1)) == [
        "F0.0 >a1.0 <a3.0 F3.0 I3.0 >g2.0 W3.0 <g0.0 I0.0 W0.0",
        "<a1.0 F1.0 F2.0 >a3.0 <g2.0 I2.0 I1.0 >g0.0 W2.0 W1.0",
    ]
    assert all(isinstance(step, Action) for step in program_of("interleaved", 1, 3, 3).steps[0])


@settings(deadline=None, max_examples=60)
@given(NAMES, RANKS, MICROBATCHES, CHUNKS, st.randoms(use_true_random=False), st.booleans())
def test_programs_run_in_any_interleaving_whether_sends_wait_or_not(
    name: str, ranks: int, microbatches: int, chunks: int, rng: random.Random, sends_wait: bool
) -> None:
    program = program_of(name, ranks, microbatches, chunks)
    check(program)
    assert run(program, rng, sends_wait=sends_wait) == sum(map(len, program.steps))


@settings(deadline=None, max_examples=50)
@given(NAMES, RANKS, MICROBATCHES, CHUNKS)
def test_both_ranks_of_a_pair_have_the_same_messages_in_the_same_order(
    name: str, ranks: int, microbatches: int, chunks: int
) -> None:
    """This holds for both directions together, so one NCCL group per pair would work."""
    program = program_of(name, ranks, microbatches, chunks)
    pairs: dict[tuple[int, int], list[tuple[int, str, int, int]]] = defaultdict(list)
    for rank, row in enumerate(program.steps):
        for step in row:
            if not isinstance(step, Action):
                source = rank if isinstance(step, Send) else step.peer
                pairs[rank, step.peer].append((source, step.what, step.stage, step.microbatch))
    for (rank, peer), messages in pairs.items():
        assert messages == pairs[peer, rank]
    messages = sum(map(len, pairs.values())) // 2
    cuts = sum(a != b for a, b in zip(program.schedule.rank_of, program.schedule.rank_of[1:], strict=False))
    assert messages == 2 * microbatches * cuts


@settings(deadline=None, max_examples=50)
@given(NAMES, st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_a_program_without_one_of_its_steps_or_with_one_twice_is_refused(
    name: str, ranks: int, microbatches: int, rng: random.Random
) -> None:
    program = program_of(name, ranks, microbatches)
    rank = rng.randrange(ranks)
    place = rng.randrange(len(program.steps[rank]))
    for mutant in (
        changed(program, rank, lambda row: row.pop(place)),
        changed(program, rank, lambda row: row.insert(place, row[place])),
    ):
        with pytest.raises(ScheduleError, match=f"^program of {name}: rank {rank} "):
            check(mutant)


def test_a_schedule_cut_short_is_refused() -> None:
    table = schedule("1f1b", 2, 2)
    short = reordered(table, 1, "F1.0 B1.0 F1.1")
    with pytest.raises(ScheduleError, match=r"^schedule 1f1b: rank 1 never runs B1\.1$"):
        with_messages(short)
    whole = with_messages(table)
    with pytest.raises(ScheduleError, match="rank 1 differs from its schedule: it runs 3 actions, expected 4"):
        check(changed(whole, 1, lambda row: row.__delitem__(slice(-2, None))))
    with pytest.raises(ScheduleError, match=r"rank 1 never runs B1\.1"):
        check(replace(whole, schedule=short))
    with pytest.raises(ScheduleError, match="has 1 ranks, expected 2"):
        check(replace(whole, steps=whole.steps[:1]))


@pytest.mark.parametrize(
    ("name", "order", "message"),
    [
        ("gpipe", "F0.1 F0.0 B0.0 B0.1", r"rank 0 runs F0\.1 before F0\.0 \(places 0 and 1\); swap them"),
        ("gpipe", "F0.0 F0.1 B0.1 B0.0", r"rank 0 runs B0\.1 before B0\.0"),
        ("gpipe", "F0.0 B0.1 F0.1 B0.0", r"rank 0 runs B0\.1 before B0\.0"),
        ("gpipe", "F0.0 F0.0 B0.0 B0.1", r"F0\.0 occurs 2 times, expected once"),
        ("gpipe", "F0.0 F0.1 B0.0 I0.1", r"rank 0 never runs I0\.0"),
        ("gpipe", "F0.0 F0.1 B0.0 B0.1 F1.1", r"F1\.1 occurs 2 times, expected once"),
        ("gpipe", "F0.0 F0.1 B0.0 B0.1 F0.2", r"rank 0 runs F0\.2, but there are 2 stages and 2 micro-batches"),
        ("zb1p", "F0.0 F0.1 I0.0 I0.1 W0.1 W0.0", r"rank 0 runs W0\.1 before W0\.0 \(places 4 and 5\)"),
        ("zb1p", "F0.0 F0.1 I0.0 W0.0 W0.1 I0.1", r"rank 0 runs W0\.1 before I0\.1 \(places 4 and 5\)"),
        ("zb1p", "F0.0 F0.1 I0.0 W0.0 I0.1 W0.1 B0.0", r"stage 0 runs B0\.0, but splits its other backwards"),
    ],
)
def test_orders_that_give_wrong_gradients_are_refused(name: str, order: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=f"^schedule {name}: .*{message}"):
        with_messages(reordered(schedule(name, 2, 2), 0, order))


def test_an_action_on_another_rank_than_its_stage_is_refused() -> None:
    table = schedule("gpipe", 2, 1)
    with pytest.raises(ScheduleError, match=r"rank 0 runs F1\.0, but rank 1 has that stage"):
        with_messages(replace(table, actions=(table.actions[1], table.actions[0])))


def test_ranks_that_wait_for_each_other_in_any_order_of_messages_are_refused() -> None:
    """Rank 0 needs a gradient before it sends the second activation; rank 1 needs both activations for any backward."""
    table = reordered(schedule("gpipe", 2, 2), 0, "F0.0 B0.0 F0.1 B0.1")
    with pytest.raises(ScheduleError, match=r"ranks deadlock: rank 0 before B0\.0, rank 1 before F1\.1"):
        with_messages(table)
    steps = tuple(tuple(step for step in row) for row in table.actions)
    with pytest.raises(ScheduleError, match=r"never ends: rank 0 before B0\.0, rank 1 before F1\.1"):
        simulate(Program(table, steps))


def test_crossed_messages_are_refused_with_their_places() -> None:
    def cross(row: list[Step]) -> None:
        row.insert(0, row.pop(2))  # <a1.1 <a1.0 F1.0 F1.1 ..

    with pytest.raises(
        ScheduleError,
        match=r"message 0 from rank 0 to rank 1 is sent as >a1\.0 but received as <a1\.1; ",
    ):
        check(changed(program_of("gpipe", 2, 2), 1, cross))


def test_a_deadlock_of_sends_that_wait_is_refused_with_where_ranks_stand() -> None:
    def later(row: list[Step]) -> None:
        place = row.index(Receive("activation", 1, 1, 0))
        row[place], row[place + 1] = row[place + 1], row[place]  # >g0.0 before <a1.1

    where = r"rank 0 at >a1\.1 \(place 3\), rank 1 at >g0\.0 \(place 3\)"
    with pytest.raises(ScheduleError, match=f"deadlock when sends block until they are received: {where}$"):
        check(changed(program_of("1f1b", 2, 3), 1, later))


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (1, lambda row: row.pop(0), r"rank 1 lacks <a1\.0 \(rank 0\); it must precede F1\.0 \(place 0\)"),
        (0, lambda row: row.pop(1), r"rank 0 lacks >a1\.0 \(rank 1\); it must follow F0\.0 \(place 0\)"),
        (0, lambda row: row.insert(0, row.pop(1)), r"rank 0 has >a1\.0 \(rank 1\) at place 0; it must follow F0\.0"),
        (1, lambda row: row.insert(1, row.pop(0)), r"rank 1 has <a1\.0 \(rank 0\) at place 1; it must precede F1\.0"),
        (
            1,
            lambda row: row.insert(3, Send("gradient", 0, 0, 2)),
            r"rank 1 has >g0\.0 \(rank 2\) at place 3, which no action",
        ),
        (0, lambda row: row.insert(1, row[1]), r"rank 0 has >a1\.0 twice, at places 1 and 2"),
        (0, lambda row: row.pop(0), r"rank 0 differs from its schedule: it runs F0\.1, expected F0\.0"),
    ],
)
def test_messages_that_are_missing_or_at_a_wrong_place_are_refused(
    rank: int, change: Callable[[list[Step]], object], message: str
) -> None:
    with pytest.raises(ScheduleError, match=f"^program of gpipe: {message}"):
        check(changed(program_of("gpipe", 2, 2), rank, change))
