"""Simulated steps: bubbles compared with formulas, activations in flight with bounds, times with drawings."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.pipe.schedules.actions import Action
from muster.pipe.schedules.messages import with_messages
from muster.pipe.schedules.programs import sent_after
from muster.pipe.schedules.simulate import Costs, Simulated, bubble_formula, simulate
from muster.pipe.schedules.tables import SCHEDULES, schedule
from muster.pipe.schedules.times import needs

pytestmark = pytest.mark.slow

RANKS, MICROBATCHES, CHUNKS = st.integers(1, 8), st.integers(1, 12), st.integers(1, 3)


def simulated(name: str, ranks: int, microbatches: int, chunks: int = 2, costs: Costs | None = None) -> Simulated:
    """Simulate a schedule."""
    return simulate(with_messages(schedule(name, ranks, microbatches, chunks=chunks)), costs)


@settings(deadline=None)
@given(st.sampled_from(sorted(SCHEDULES.keys() - {"zbv"})), RANKS, MICROBATCHES, CHUNKS)
def test_the_bubble_is_that_of_the_formula(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    found = simulated(name, ranks, microbatches, chunks)
    assert found.bubble == pytest.approx(bubble_formula(name, ranks, microbatches, chunks), abs=1e-12)
    assert found.bubble_without_barrier == pytest.approx(found.bubble, abs=1e-12)


@settings(deadline=None, max_examples=25)
@given(RANKS, st.integers(1, 30))
def test_the_bubble_of_zbv_is_that_of_the_formula_from_two_micro_batches_a_rank_on(
    ranks: int, microbatches: int
) -> None:
    found, formula = simulated("zbv", ranks, microbatches), bubble_formula("zbv", ranks, microbatches)
    assert found.bubble >= formula - 1e-12
    assert found.bubble <= formula + 0.08
    if microbatches >= 2 * ranks:
        assert found.bubble == pytest.approx(formula, abs=1e-12)
        assert found.makespan_s == 6 * microbatches + ranks - 1


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    RANKS,
    MICROBATCHES,
    CHUNKS,
    st.lists(st.floats(0, 4), min_size=6, max_size=6).filter(lambda seconds: sum(seconds[:3]) > 0),
)
def test_whatever_things_take_an_action_begins_when_its_rank_is_free_and_what_it_needs_is_there(
    name: str, ranks: int, microbatches: int, chunks: int, seconds: list[float]
) -> None:
    costs = Costs(*seconds)
    plan = schedule(name, ranks, microbatches, chunks=chunks, costs=costs)
    found = simulate(with_messages(plan), costs)
    ends = {span.step: span.end_s for row in found.spans for span in row}
    busy_s = 0.0
    for rank, row in enumerate(found.spans):
        free_s = 0.0
        for span in row:
            assert isinstance(span.step, Action)
            assert span.start_s >= free_s - 1e-9
            for need in needs(span.step, plan.stages):
                way_s = costs.between(need.stage, span.step.stage) if plan.rank_of[need.stage] != rank else 0.0
                assert span.start_s >= ends[need] + way_s - 1e-9
            free_s = span.end_s + (costs.sending(span.step.stage) if sent_after(span.step, plan.rank_of) else 0.0)
            busy_s += costs.of(span.step)
    assert found.makespan_s == max(ends.values())
    assert found.bubble == pytest.approx(1 - busy_s / (ranks * found.makespan_s), abs=1e-9)
    assert -1e-9 <= found.bubble_without_barrier <= found.bubble + 1e-9


def test_formulas_are_those_of_the_papers() -> None:
    """Four ranks, eight micro-batches, F = I = W."""
    assert bubble_formula("model", 4, 8) == 3 / 4
    assert bubble_formula("gpipe", 4, 8) == bubble_formula("1f1b", 4, 8) == 3 / 11
    assert bubble_formula("interleaved", 4, 8, 2) == 3 / 19
    assert bubble_formula("interleaved", 4, 8, 3) == 3 / 27
    assert bubble_formula("zb1p", 4, 8) == 3 / 27
    assert bubble_formula("zbv", 4, 8) == pytest.approx(3 / 51)


@settings(deadline=None, max_examples=40)
@given(RANKS, MICROBATCHES, CHUNKS)
def test_activations_in_flight_are_as_many_as_a_schedule_promises(ranks: int, microbatches: int, chunks: int) -> None:
    def peaks(name: str) -> list[int]:
        return list(simulated(name, ranks, microbatches, chunks).peak_in_flight)

    assert peaks("model") == [1] * ranks
    assert peaks("gpipe") == [microbatches] * ranks
    assert peaks("1f1b") == [min(ranks - stage, microbatches) for stage in range(ranks)]
    assert max(peaks("zb1p")) == min(ranks, microbatches)
    assert max(peaks("zbv")) <= 2 * min(ranks, microbatches)
    if chunks > 1:
        largest = -(-microbatches // max(1, microbatches // ranks))  # round of micro-batches
        ahead = [2 * (ranks - rank - 1) + (chunks - 1) * largest + 1 for rank in range(ranks)]
        assert peaks("interleaved") == [min(each, chunks * microbatches) for each in ahead]


def test_an_activation_of_a_split_backward_lives_to_its_w() -> None:
    """Rank 1 of F F I F I F W I W W holds two activations to the end of W, one to the end of I."""
    assert simulated("zb1p", 2, 4).peak_in_flight == (2, 2)


def test_times_of_a_small_step_are_those_drawn() -> None:
    """Stages take 1 and 2 s forward, 2 and 4 s backward; a message takes half a second. Each letter is half a second.

    rank 0   FF > . . . . . . . . . . . . BBBB
    rank 1   . .  FFFF BBBBBBBB          >
    """
    costs = Costs(forward=(1.0, 2.0), input_gradient=(1.0, 2.0), weight_gradient=(1.0, 2.0), message=0.5)
    found = simulated("1f1b", 2, 1, costs=costs)
    times = [[(str(span.step), span.start_s, span.end_s) for span in row] for row in found.spans]
    assert times == [[("F0.0", 0, 1), ("B0.0", 8, 10)], [("F1.0", 1.5, 3.5), ("B1.0", 3.5, 7.5)]]
    sent = [[(str(span.step), span.start_s, span.end_s) for span in row] for row in found.messages]
    assert sent == [[(">a1.0", 1, 1.5)], [(">g0.0", 7.5, 8)]]
    assert found.makespan_s == 10
    assert found.bubble == pytest.approx(1 - 9 / 20)
    assert found.bubble_without_barrier == found.bubble


def test_a_rank_goes_on_when_a_message_has_left_it_and_begins_when_it_has_taken_one() -> None:
    """Actions take a second, sending a second and a half, accepting half a second. Each letter is half a second.

    rank 0   FF > > > FF > > > . . . . BBBB
    rank 1   . . FFFF FF ...                     accepts a message while it waits, which costs nothing more
    """
    costs = Costs(forward=(1.0, 2.0), send=(1.5, 0.0), take=(0.5, 0.5))
    rows = simulated("gpipe", 2, 2, costs=costs).spans
    found = [[(str(span.step), span.start_s, span.end_s) for span in row] for row in rows]
    assert found[0][:2] == [("F0.0", 0, 1), ("F0.1", 2.5, 3.5)]
    assert found[1][:2] == [("F1.0", 1, 3), ("F1.1", 3.5, 5.5)]  # waits for the first; the second is accepted by 3.5
    assert found[1][2:] == [("B1.0", 5.5, 7.5), ("B1.1", 7.5, 9.5)]
    assert found[0][2:] == [("B0.0", 7.5, 9.5), ("B0.1", 10.0, 12.0)]


def test_messages_on_one_way_follow_each_other() -> None:
    found = simulated("gpipe", 2, 3, costs=Costs(message=5.0))
    assert [(span.start_s, span.end_s) for span in found.messages[0]] == [(1, 6), (6, 11), (11, 16)]
    assert [span.start_s for span in found.spans[1]][:3] == [6, 11, 16]


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "input_s", "weight_s", "message_s", "at_most_s"),
    [
        ("zb1p", 2, 3, 0.5, 2.0, 1.0, 14.0),  # W directly after I
        ("zb1p", 3, 4, 0.5, 1.5, 0.5, 16.5),  # W half as late as in the paper
        ("zb1p", 3, 4, 0.5, 3.0, 0.5, 21.5),  # a rank waits for an I instead of beginning a long W
        ("zbv", 3, 4, 1.0, 0.5, 0.0, 24.5),  # the order for F = I = W
        ("zbv", 4, 6, 2.0, 1.0, 0.0, 56.0),
        ("zbv", 3, 4, 0.5, 1.5, 2.0, 44.5),
        ("zbv", 2, 3, 2.0, 2.0, 0.5, 34.0),
        ("zbv", 3, 4, 3.0, 1.0, 1.0, 68.0),
    ],
)
def test_zero_bubble_orders_fit_what_actions_cost(
    name: str, ranks: int, microbatches: int, input_s: float, weight_s: float, message_s: float, at_most_s: float
) -> None:
    """Each row is won by a different one of the tried orders."""
    costs = Costs(1.0, input_s, weight_s, message_s)
    fitted = simulate(with_messages(schedule(name, ranks, microbatches, costs=costs)), costs)
    assert fitted.makespan_s <= at_most_s
    assert max(fitted.peak_in_flight) <= min(ranks, microbatches) * (2 if name == "zbv" else 1)


@pytest.mark.parametrize(("ranks", "microbatches", "at_most"), [(2, 8, 1.05), (4, 8, 1.24), (4, 16, 1.32)])
def test_zbv_without_costs_is_not_much_longer_where_they_are_those_of_blocks(
    ranks: int, microbatches: int, at_most: float
) -> None:
    """Some orders that are equally short for F = I = W took 1.23 to 1.38 times a rank's work with these costs."""
    blocks = Costs(1.75, 2.04, 1.07, 0.3)
    found = simulated("zbv", ranks, microbatches, costs=blocks)
    assert found.makespan_s <= at_most * 2 * microbatches * (1.75 + 2.04 + 1.07)
    assert simulated("zbv", ranks, microbatches).makespan_s == 6 * microbatches + ranks - 1


def test_every_cut_has_its_own_message_cost() -> None:
    """Three stages of a second each; a message over the first cut takes 1 s, over the second 10 s, both ways."""
    found = simulated("gpipe", 3, 1, costs=Costs(message=(1.0, 10.0)))
    assert [[span.start_s for span in row] for row in found.spans] == [[0, 29], [2, 26], [13, 14]]
    assert found.makespan_s == 31


def test_idle_time_shrinks_from_model_to_zbv() -> None:
    names = ("model", "1f1b", "interleaved", "zb1p", "zbv")
    bubbles = [simulated(name, 4, 8).bubble for name in names]
    assert bubbles == sorted(bubbles, reverse=True)
    assert simulated("zb1p", 4, 64).bubble == pytest.approx(simulated("1f1b", 4, 64).bubble / 3, rel=0.05)
    assert simulated("zbv", 4, 64).bubble_without_barrier < 0.003


def test_simulating_refuses_costs_for_other_stages() -> None:
    with pytest.raises(ValueError, match="costs: input_gradient has 2 numbers, expected 3"):
        simulated("gpipe", 3, 2, costs=Costs(input_gradient=(1.0, 1.0)))
    with pytest.raises(ValueError, match="costs: send has 2 numbers, expected 3, one for each of the stages"):
        simulated("gpipe", 3, 2, costs=Costs(send=(1.0, 1.0)))
