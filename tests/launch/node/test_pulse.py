"""How long ago ranks last moved, by looks at what they wrote; the clock is the test's."""

from hypothesis import given
from hypothesis import strategies as st

from muster.launch.node.pulse import Pulse


def seen(
    rank: int,
    *,
    phase: str = "run",
    steps: int = 0,
    beats: int = 0,
    slowest_s: float = 0.1,
    held: int = -1,
    session: bool = True,
) -> list:
    return [rank, phase, steps, beats, slowest_s, held, session]


def look_each_second(pulse: Pulse, begin: float, end: float, *ranks: list) -> None:
    now = begin
    while now <= end:
        pulse.note(ranks, now)
        now += 1.0


def test_nothing_is_known_before_the_first_look() -> None:
    pulse = Pulse()
    assert pulse.record(5.0) is None
    pulse.note([], 6.0)
    assert pulse.record(6.0) is None
    assert pulse.held is None
    assert pulse.seen(0) == {}


def test_an_age_is_the_time_since_the_beats_last_changed() -> None:
    pulse = Pulse()
    look_each_second(pulse, 100.0, 109.0, seen(0, beats=1, steps=3), seen(1, beats=1, steps=4, phase="save"))
    pulse.note([seen(0, beats=2, steps=3), seen(1, beats=1, steps=4, phase="save", slowest_s=0.7)], 110.0)
    assert pulse.record(110.5, "sT".__getitem__) == {
        "steps": 4,
        "beats_age_s": 0.5,
        "ranks": {
            "1": {"phase": "save", "steps": 4, "beats_age_s": 10.5, "state": "T"},
            "0": {"phase": "run", "steps": 3, "beats_age_s": 0.5, "state": ""},
        },
        "phases": ("run", "save"),
        "slowest_s": 0.7,
        "sessions": 2,
        "output_age_s": None,
    }


def test_ranks_that_have_ended_count_no_more_and_how_far_they_came_stays() -> None:
    pulse = Pulse()
    pulse.note([seen(0, steps=7), seen(1, steps=5)], 1.0)
    pulse.ended(0, 8)
    record = pulse.record(1.5)
    assert (record["steps"], list(record["ranks"])) == (8, ["1"])
    pulse.note([], 2.0)
    record = pulse.record(2.0)
    assert (record["steps"], record["phases"], record["ranks"], record["sessions"]) == (8, (), {}, 0)


def test_output_has_an_age_once_there_is_any() -> None:
    pulse = Pulse()
    ages = []
    for second, written in enumerate((0, 0, 5, 5, 9, 9)):
        pulse.note([seen(0, session=False)], float(second))
        pulse.note_output(written, float(second))
        record = pulse.record(float(second))
        ages.append((record["sessions"], record["output_age_s"]))
    assert ages == [(0, age_s) for age_s in (None, None, 0.0, 1.0, 0.0, 1.0)]


def test_ranks_that_end_before_the_first_look_are_known_all_the_same() -> None:
    pulse = Pulse()
    pulse.ended(0, None)  # a program of the user's
    assert pulse.record(1.0) is None
    pulse.ended(1, 3)
    record = pulse.record(1.0)
    assert record["steps"] == 3


def test_the_farthest_of_those_that_hold_is_told() -> None:
    pulse = Pulse()
    pulse.note([seen(0, held=-1), seen(1, held=11), seen(2, held=12)], 1.0)
    assert pulse.held == 12


def test_what_one_rank_does_can_be_asked() -> None:
    pulse = Pulse()
    pulse.note([seen(4, phase="load", steps=2)], 1.0)
    assert pulse.seen(4) == {"phase": "load", "steps": 2}


def test_when_this_process_stood_still_the_ranks_are_not_taken_for_silent() -> None:
    pulse = Pulse()
    look_each_second(pulse, 0.0, 10.0, seen(0, beats=3))
    asleep_s = 3600.0
    record = pulse.record(10.0 + asleep_s)  # asked before it could look again
    assert record["beats_age_s"] == 11.0  # ten, and what may pass between two looks
    look_each_second(pulse, 11.0 + asleep_s, 20.0 + asleep_s, seen(0, beats=3))
    again = pulse.record(20.0 + asleep_s)
    assert again["beats_age_s"] == 21.0


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=40))
def test_the_youngest_age_is_that_of_the_rank_which_moved_last(moves: list[list[bool]]) -> None:
    """Each row is a second: which of three ranks moved in it."""
    pulse, beats = Pulse(), [0, 0, 0]
    last = [0, 0, 0]
    pulse.note([seen(rank, beats=0) for rank in range(3)], 0.0)
    for second, row in enumerate(moves, start=1):
        for rank, moved in enumerate(row):
            if moved:
                beats[rank] += 1
                last[rank] = second
        pulse.note([seen(rank, beats=beats[rank]) for rank in range(3)], float(second))
    record = pulse.record(float(len(moves)))
    assert record["beats_age_s"] == len(moves) - max(last)
    ages = [told["beats_age_s"] for told in record["ranks"].values()]
    assert ages == [len(moves) - moved for moved in sorted(last)]
