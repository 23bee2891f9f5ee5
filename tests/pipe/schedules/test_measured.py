"""Records of a step: their bubble, the costs derived from them, and drawings equal to simulated ones."""

import json
from dataclasses import replace

import pytest

from muster.pipe.schedules.actions import Action, Schedule
from muster.pipe.schedules.draw import bar, text
from muster.pipe.schedules.measured import Record, bars, bubble, busy_s, compare, mean_costs, spread
from muster.pipe.schedules.messages import with_messages
from muster.pipe.schedules.programs import received_before, sent_after
from muster.pipe.schedules.simulate import Costs, simulate
from muster.pipe.schedules.tables import SCHEDULES, schedule

COSTS = Costs(forward=1.0, input_gradient=1.25, weight_gradient=0.75, message=0.125)


def recorded(plan: Schedule, costs: Costs = COSTS) -> list[Record]:
    """Return records of a step that went exactly as simulated, with its sends and waits."""
    spans = simulate(with_messages(plan), costs).spans
    records = []
    for rank, row in enumerate(spans):
        free_s = 0.0
        for each in row:
            action = each.step
            assert isinstance(action, Action)
            if received_before(action, plan.rank_of):
                records.append(Record(rank, "wait", action.stage, action.microbatch, free_s, each.start_s))
            records.append(Record(rank, action.kind, action.stage, action.microbatch, each.start_s, each.end_s))
            free_s = each.end_s
            if send := sent_after(action, plan.rank_of):
                free_s += costs.sending(action.stage)
                records.append(Record(rank, "send", send.stage, action.microbatch, each.end_s, free_s))
    return records


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (4, 8), (4, 2)])
def test_a_step_as_simulated_has_the_simulated_bubble_and_the_costs_it_was_made_of(
    name: str, ranks: int, microbatches: int
):
    plan = schedule(name, ranks, microbatches)
    stages, across = range(plan.stages), zip(plan.rank_of, plan.rank_of[1:], strict=False)
    costs = replace(
        COSTS,
        forward=tuple(1.0 + 0.25 * stage for stage in stages),
        input_gradient=tuple(1.5 + 0.125 * stage for stage in stages),
        message=tuple(0.0 if here == there else 0.125 for here, there in across),
        send=tuple(0.03125 * (1 + stage % 2) for stage in stages),
        take=tuple(0.0625 * (1 + stage % 2) for stage in stages),
    )
    records = recorded(plan, costs)
    simulated = simulate(with_messages(plan), costs)
    assert bubble(records, ranks) == pytest.approx(simulated.bubble)
    found = compare([records, records], plan)
    assert found.measured == pytest.approx(simulated.bubble)
    assert found.simulated == pytest.approx(simulated.bubble, abs=0.02)  # messages that no rank waited for are unknown
    assert found.costs.forward == pytest.approx(costs.forward)
    for action in {action for row in plan.actions for action in row}:
        assert found.costs.of(action) == pytest.approx(costs.of(action))
        if sent_after(action, plan.rank_of):
            assert found.costs.sending(action.stage) == pytest.approx(costs.sending(action.stage))


def test_the_bubble_is_what_lies_between_the_first_start_and_the_last_end():
    records = [
        Record(0, "F", 0, 0, 10.0, 12.0),  # 2 of 8
        Record(0, "wait", 0, 0, 12.0, 17.0),
        Record(0, "B", 0, 0, 17.0, 18.0),  # 1 of 8
        Record(1, "send", 1, 0, 0.0, 30.0),
        Record(1, "I", 1, 0, 12.0, 14.0),
        Record(1, "W", 1, 0, 13.0, 15.0),  # 3 of 8: the overlapping second counts once
    ]
    assert bubble(records, 2) == pytest.approx(1 - 6 / 16)
    assert bubble(records, 3) == pytest.approx(1 - 6 / 24)  # the third rank did nothing
    assert bubble([], 2) == 0.0
    assert busy_s(records, 3) == (3.0, 3.0, 0.0)


def test_the_spread_is_that_of_actions_of_one_kind_and_stage():
    took_s = {("F", 0): (1.0, 3.0), ("B", 0): (10.0, 10.0), ("F", 1): (2.0, 2.0), ("send", 1): (0.1, 5.0)}
    records = [Record(0, kind, stage, 0, 5.0, 5.0 + each) for (kind, stage), both in took_s.items() for each in both]
    assert spread(records) == (0.5, 1.5)
    assert spread([]) == spread([Record(0, "F", 0, 0, 1.0, 1.0)]) == (1.0, 1.0)


def test_a_message_takes_what_a_rank_that_is_free_waits_and_a_busy_rank_says_nothing():
    plan = schedule("gpipe", 2, 2)
    records = [
        Record(0, "F", 0, 0, 0.0, 1.0),
        Record(1, "F", 1, 0, 1.25, 3.0),  # waited 0.25
        Record(0, "F", 0, 1, 1.0, 2.0),
        Record(1, "F", 1, 1, 3.0, 4.0),  # was busy until then
        Record(1, "B", 1, 0, 4.0, 5.0),
        Record(0, "B", 0, 0, 5.75, 6.0),  # waited 0.75
        Record(1, "B", 1, 1, 5.0, 6.0),
        Record(0, "B", 0, 1, 6.5, 7.0),  # waited 0.5
    ]
    costs = mean_costs([records], plan)
    assert costs.message == pytest.approx((0.5,))
    assert costs.forward == pytest.approx((1.0, 1.375))
    held_up = [
        replace(each, start_s=55.75, end_s=56.0) if each.action == Action("B", 0, 0) else each for each in records
    ]
    held_up[-1] = replace(held_up[-1], start_s=56.0, end_s=56.5)
    assert mean_costs([records, held_up], plan).message == pytest.approx((0.5,))  # of 0.25, 0.75, 0.5, 0.25 and 50.75


def test_handling_messages_costs_a_rank_what_its_sends_took_and_waits_for_what_was_there() -> None:
    plan = schedule("gpipe", 2, 2)
    records = [
        Record(0, "F", 0, 0, 0.0, 1.0),
        Record(0, "send", 1, 0, 1.0, 1.25),
        Record(0, "F", 0, 1, 1.25, 2.25),
        Record(0, "send", 1, 1, 2.25, 2.75),
        Record(1, "wait", 1, 0, 0.0, 1.5),  # for a message that had not arrived
        Record(1, "F", 1, 0, 1.5, 3.5),
        Record(1, "wait", 1, 1, 3.5, 3.625),  # for one that had arrived
        Record(1, "F", 1, 1, 3.625, 5.625),
        Record(1, "B", 1, 0, 5.625, 6.625),
        Record(1, "send", 0, 0, 6.625, 6.625),
        Record(1, "B", 1, 1, 6.625, 7.625),
        Record(1, "send", 0, 1, 7.625, 7.625),
        Record(0, "wait", 0, 0, 2.75, 7.125),
        Record(0, "B", 0, 0, 7.125, 9.125),
        Record(0, "wait", 0, 1, 9.125, 9.375),  # for one that had arrived
        Record(0, "B", 0, 1, 9.375, 11.375),
    ]
    costs = mean_costs([records], plan)
    assert (costs.send, costs.take, costs.message) == ((0.375, 0.0), (0.25, 0.125), (0.5,))
    compared = compare([records], plan)
    assert compared.simulation.makespan_s == 11.375  # as recorded: nothing else delayed a rank
    assert compared.simulated == pytest.approx(compared.measured)
    quiet = [each for each in records if each.kind not in ("send", "wait")]
    without = compare([quiet], plan)
    assert (without.costs.send, without.costs.take) == ((0.0, 0.0), (0.0, 0.0))
    assert without.simulation.makespan_s < 11.375


def test_records_that_lack_an_action_are_refused_by_its_name():
    plan = schedule("zb1p", 2, 3)
    records = [each for each in recorded(plan) if (each.kind, each.stage) != ("W", 1)]
    with pytest.raises(ValueError, match=r"records lack W1; expected every action of 'zb1p'"):
        mean_costs([records], plan)


def test_records_go_through_json_and_are_drawn_as_the_simulation_is():
    plan = schedule("zbv", 3, 6)
    records = [Record(**json.loads(json.dumps(each.as_dict()))) for each in recorded(plan)]
    assert records == recorded(plan)
    spans = simulate(with_messages(plan), COSTS).spans
    drawn = [[bar(each.step, each.start_s, each.end_s, plan.rank_of) for each in row] for row in spans]
    actions = [each for each in records if each.kind not in ("send", "wait")]
    assert bars(actions, plan.rank_of) == drawn
    assert text(bars(actions, plan.rank_of)) == text(drawn)
    assert {each.kind for row in bars(records, plan.rank_of) for each in row} == {"F", "I", "W", "send", "receive"}
