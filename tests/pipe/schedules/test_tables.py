"""Tables of all schedules: small ones compared with drawings, all of them with the rules of a correct step."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.pipe.schedules.actions import Action, Schedule
from muster.pipe.schedules.costs import Costs
from muster.pipe.schedules.messages import with_messages
from muster.pipe.schedules.simulate import simulate
from muster.pipe.schedules.tables import SCHEDULES, schedule

NAMES = st.sampled_from(sorted(SCHEDULES))
RANKS, MICROBATCHES, CHUNKS = st.integers(1, 8), st.integers(1, 12), st.integers(1, 3)
SECONDS = st.floats(0.1, 4)


def drawn(table: Schedule) -> list[str]:
    """Write a table as this file draws it: with stages only if a rank has several."""
    several = table.stages > table.ranks
    return [
        " ".join(str(action) if several else f"{action.kind}{action.microbatch}" for action in row)
        for row in table.actions
    ]


def in_time(table: Schedule) -> list[str]:
    """Draw a step of unit costs: a letter is one unit, small for a rank's later stage; a dot is idle."""
    lines = []
    for row in simulate(with_messages(table)).spans:
        line = ""
        for span in row:
            assert isinstance(span.step, Action)
            line += "." * (int(span.start_s) - len(line))
            line += span.step.kind if span.step.stage < table.ranks else span.step.kind.lower()
        lines.append(line)
    return lines


def test_model_sends_one_micro_batch_at_a_time_through_all_stages_and_back() -> None:
    assert drawn(schedule("model", 2, 3)) == ["F0 B0 F1 B1 F2 B2", "F0 B0 F1 B1 F2 B2"]


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    assert drawn(schedule("gpipe", 2, 3)) == ["F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2"]


def test_1f1b_warms_up_by_the_ranks_that_follow() -> None:
    assert drawn(schedule("1f1b", 3, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_1f1b_with_fewer_micro_batches_than_ranks_warms_up_with_what_there_is() -> None:
    assert drawn(schedule("1f1b", 4, 2)) == ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]


def test_interleaved_goes_in_rounds_of_as_many_micro_batches_as_ranks() -> None:
    table = schedule("interleaved", 2, 4, chunks=2)
    assert table.rank_of == (0, 1, 0, 1)
    assert drawn(table) == [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ]


def test_interleaved_makes_rounds_larger_where_ranks_do_not_divide_micro_batches() -> None:
    assert drawn(schedule("interleaved", 2, 3, chunks=2)) == [
        "F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 B2.0 B2.1 B2.2 B0.0 B0.1 B0.2",
        "F1.0 F1.1 F1.2 F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 B1.0 B1.1 B1.2",
    ]


def test_interleaved_with_one_chunk_is_1f1b() -> None:
    assert schedule("interleaved", 3, 5, chunks=1).actions == schedule("1f1b", 3, 5).actions


def test_zb1p_is_the_papers_drawing_when_f_i_and_w_take_the_same_time() -> None:
    assert in_time(schedule("zb1p", 4, 8)) == [  # Qi et al. 2024, figure 3, above
        "FFFF...IWFIWFIWFIWFIWIWIWIW",
        ".FFF..IFIWFIWFIWFIWFIWIWIWW",
        "..FF.IFIFIWFIWFIWFIWFIWIWWW",
        "...FIFIFIFIWFIWFIWFIWFIWWWW",
    ]


def test_zbv_places_stages_down_the_ranks_and_up_again_and_takes_a_unit_more_than_its_work() -> None:
    assert schedule("zbv", 3, 4).rank_of == (0, 1, 2, 2, 1, 0)
    assert in_time(schedule("zbv", 2, 2)) == [
        "FF.fifiwIWwIW",
        ".FfFfiIiIwWwW",
    ]
    assert in_time(schedule("zbv", 2, 4)) == [
        "FFFfiwfiIWFwIWfiwfiwIWIW",
        ".FfFfiIwFiIWfwFWfiIwiIWwW",
    ]


@settings(deadline=None)
@given(NAMES, RANKS, MICROBATCHES, CHUNKS)
def test_every_forward_comes_before_its_backward_before_its_weights_each_once(
    name: str, ranks: int, microbatches: int, chunks: int
) -> None:
    table = schedule(name, ranks, microbatches, chunks=chunks)
    kinds = ("F", "I", "W") if SCHEDULES[name].splits_backward else ("F", "B")
    assert table.splits_backward == SCHEDULES[name].splits_backward
    assert table.stages == SCHEDULES[name].stages(ranks, chunks)
    assert sorted(set(table.rank_of)) == list(range(ranks))
    for rank, row in enumerate(table.actions):
        stages = [stage for stage, owner in enumerate(table.rank_of) if owner == rank]
        wanted = [Action(kind, stage, index) for kind in kinds for stage in stages for index in range(microbatches)]
        assert sorted(row) == sorted(wanted)
        place = {action: at for at, action in enumerate(row)}
        for stage in stages:
            for index in range(microbatches):
                mine = [place[Action(kind, stage, index)] for kind in kinds]
                assert mine == sorted(mine)
            for kind in kinds:  # so that sums of gradients have the order of a loop
                assert all(
                    place[Action(kind, stage, a)] < place[Action(kind, stage, b)]
                    for a, b in pairwise(range(microbatches))
                )


@settings(deadline=None, max_examples=15)
@given(RANKS, MICROBATCHES, st.lists(SECONDS, min_size=48, max_size=48), st.floats(0, 1))
def test_no_costs_make_zero_bubble_schedules_wrong_or_let_them_hold_more(
    ranks: int, microbatches: int, seconds: list[float], message_s: float
) -> None:
    for name, stages, bound in (("zb1p", ranks, ranks), ("zbv", 2 * ranks, 2 * ranks)):
        parts = [tuple(seconds[start : start + stages]) for start in (0, 16, 32)]
        costs = Costs(parts[0], parts[1], parts[2], message_s)
        table = schedule(name, ranks, microbatches, costs=costs)
        assert table == schedule(name, ranks, microbatches, costs=costs)
        simulated = simulate(with_messages(table), costs)
        assert max(simulated.peak_in_flight) <= min(bound, bound // ranks * microbatches)
        plain = "1f1b" if name == "zb1p" else name  # zbv itself tries the orders for F = I = W
        other = simulate(with_messages(schedule(plain, ranks, microbatches)), costs)
        assert simulated.makespan_s <= other.makespan_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("1f1", 2, 2),
            "schedule '1f1' is unknown; expected one of: model, gpipe, 1f1b, interleaved, zb1p, zbv, terapipe",
        ),
        (("1f1b", 0, 2), "schedule 1f1b: ranks must be at least 1, got 0"),
        (("gpipe", 2, 0), "schedule gpipe: microbatches must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused_with_numbers(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        schedule(*arguments)


def test_chunks_and_costs_that_do_not_fit_are_refused_with_numbers() -> None:
    with pytest.raises(ValueError, match="interleaved: chunks must be at least 1, got 0"):
        schedule("interleaved", 2, 2, chunks=0)
    with pytest.raises(ValueError, match="costs: forward has 3 numbers, expected 4, one for each of the stages"):
        schedule("zbv", 2, 2, costs=Costs(forward=(1.0, 1.0, 1.0)))
    with pytest.raises(ValueError, match="costs: message has 2 numbers, expected 1, one for each of the cuts"):
        schedule("zb1p", 2, 2, costs=Costs(message=(1.0, 1.0)))
    with pytest.raises(ValueError, match="costs: weight_gradient must be finite seconds of 0 or more, got nan"):
        Costs(weight_gradient=float("nan"))
