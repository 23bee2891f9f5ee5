"""Drawings of a step: texts compared with drawn ones, and a valid SVG with a cell for every span."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.pipe.schedules.actions import Action
from muster.pipe.schedules.draw import Bar, Rows, bar, extent, gaps, legend, text
from muster.pipe.schedules.programs import Receive, Send
from muster.pipe.schedules.svg import WIDTH, svg

SVG = "{http://www.w3.org/2000/svg}"
KINDS = st.sampled_from(["F", "B", "I", "W", "send", "receive"])
ROWS = st.lists(
    st.lists(
        st.builds(
            lambda kind, stage, microbatch, start_ms, lasts_ms, chunk: Bar(
                kind, stage, microbatch, start_ms / 1e3, (start_ms + lasts_ms) / 1e3, chunk
            ),
            KINDS,
            st.integers(0, 7),
            st.integers(0, 200),
            st.integers(-50_000, 50_000),
            st.integers(0, 5_000),
            st.integers(0, 3),
        ),
        max_size=6,
    ),
    max_size=4,
)


def row(drawn: str, stage: int, chunk: int = 0) -> list[Bar]:
    """Read a row from words such as `F0 .. B0--`. Every character is one unit of time."""
    bars, at_s = [], 0.0
    for piece in re.findall(r"[FBIW]\d-*|\.+", drawn):
        end_s = at_s + len(piece) / 2
        if piece[0] != ".":
            bars.append(Bar(piece[0], stage, int(piece[1]), at_s, end_s, chunk))
        at_s = end_s
    return bars


GPIPE = [
    row("F0F1F2............B0--B1--B2--", 0),
    row("..F0F1F2......B0--B1--B2--....", 1),
    row("....F0F1F2B0--B1--B2--........", 2),
]


def test_gpipe_of_three_ranks_and_micro_batches() -> None:
    assert text(GPIPE).splitlines() == [
        "rank 0  F0 F1 F2 ..................B0--- B1--- B2---",
        "rank 1  ...F0 F1 F2 .........B0--- B1--- B2--- ......",
        "rank 2  ......F0 F1 F2 B0--- B1--- B2--- ............",
    ]
    assert legend(GPIPE) == "F forward, B backward, . idle, number: micro-batch"


def test_a_narrow_terminal_gets_shorter_cells_and_at_last_kinds_alone() -> None:
    assert text(GPIPE, width=38).splitlines()[:2] == [
        "rank 0  F0F1F2............B0- B1- B2-",
        "rank 1  ..F0F1F2......B0- B1- B2- ....",
    ]
    assert text(GPIPE, width=37).splitlines()[1] == "rank 1  .FFF...B0B1B2.."
    assert text(GPIPE, width=16, names=["a", "b", "c"]).splitlines()[0].startswith("a  F")


def test_stages_of_one_rank_are_told_apart() -> None:
    two = [Bar("F", 0, 0, 0, 1), Bar("F", 3, 0, 1, 2, 1), Bar("I", 3, 0, 2, 3, 1), Bar("W", 3, 0, 3, 5, 1)]
    assert text([two]) == "rank 0  F0 f0 i0 w0---"
    assert legend([two]) == (
        "F forward, I gradient of inputs, W gradient of weights, . idle, number: micro-batch, "
        "lower case: the rank's second stage"
    )
    three = [*two, Bar("F", 4, 10, 5, 6, 2)]
    assert text([three]) == "rank 0  F0.0- F3.0- I3.0- W3.0------- F4.10"
    assert legend([three]).endswith("numbers: stage.micro-batch")


def test_a_number_that_does_not_fit_is_left_out_and_not_cut() -> None:
    """F1 for micro-batch 10 would be wrong."""
    bars = [Bar("F", 0, 9, 0, 1), Bar("F", 0, 10, 1, 2), Bar("B", 0, 10, 2, 4)]
    assert text([bars], width=16) == "rank 0  F9F B10"


def test_idle_time_shows_messages_under_way_and_work_hides_them() -> None:
    bars = [Bar("F", 0, 0, 0, 2), Bar("send", 1, 0, 1, 3), Bar("receive", 0, 0, 4, 5), Bar("B", 0, 0, 5, 6)]
    assert text([bars]) == "rank 0  F0--- ~~~...~~~B0"
    assert "~ idle, a message in transit" in legend([bars])


def test_colours_are_codes_around_the_same_text() -> None:
    coloured = text(GPIPE, colour=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured).split() == text(GPIPE).split()
    assert coloured.splitlines()[0].count("\x1b[0m") == 2  # forwards, then backwards


def test_steps_become_bars() -> None:
    assert bar(Action("W", 5, 2), 1.0, 2.0, (0, 1, 2, 0, 1, 2)) == Bar("W", 5, 2, 1.0, 2.0, 1)
    assert bar(Action("F", 1, 2), 1.0, 2.0, (0, 1, 1, 0)).chunk == 0
    assert bar(Action("F", 2, 2), 1.0, 2.0, (0, 1, 1, 0)).chunk == 1
    assert bar(Send("activation", 1, 2, 1), 1.0, 2.0, (0, 1)).kind == "send"
    assert bar(Receive("gradient", 0, 2, 1), 1.0, 2.0, (0, 1)).kind == "receive"


@pytest.mark.parametrize("rows", [[], [[]], [[], [Bar("F", 0, 0, 3.0, 3.0)]]])
def test_what_takes_no_time_is_drawn_as_nothing(rows: Rows) -> None:
    assert text(rows).split() == [word for rank in range(len(rows)) for word in ("rank", str(rank))]
    assert cells(svg(rows, title="nothing")) == []


def test_gaps_lie_between_what_is_computed_however_it_is_sorted_or_overlaps() -> None:
    bars = [Bar("B", 0, 0, 4, 5), Bar("F", 0, 0, 1, 3), Bar("F", 0, 1, 2, 2.5), Bar("send", 0, 0, 3, 4)]
    assert gaps(bars, 0, 6) == [(0, 1), (3, 4), (5, 6)]
    assert gaps([], 0, 2) == [(0, 2)]


def test_a_text_is_as_wide_as_it_may_be_and_a_measured_begin_does_not_move_it() -> None:
    moved = [[Bar(b.kind, b.stage, b.microbatch, b.start_s + 1e6, b.end_s + 1e6) for b in bars] for bars in GPIPE]
    for width in (10, 20, 37, 100):
        assert text(moved, width=width) == text(GPIPE, width=width)
        assert max(map(len, text(GPIPE, width=width).splitlines())) <= width


@given(ROWS, st.integers(20, 200))
def test_no_line_of_a_text_is_wider_than_asked_for(rows: Rows, width: int) -> None:
    assert all(len(line) <= width for line in text(rows, width=width).splitlines())


def cells(drawn: str) -> list[ElementTree.Element]:
    """Parse an SVG and return its cells."""
    root = ElementTree.fromstring(drawn)
    return [each for each in root.iter(f"{SVG}rect") if each.get("class", "").startswith("cell ")]


@given(ROWS)
def test_an_svg_has_a_cell_for_every_span_that_takes_time_within_its_width(rows: Rows) -> None:
    drawn = svg(rows, title="a < b & c", subtitle='"', unit="ms")
    shown = [each for bars in rows for each in bars if each.seconds > 0]
    found = cells(drawn)
    assert [each.get("class") for each in found] == [f"cell {each.kind}" for each in shown]
    begin_s, end_s = extent(rows)
    idle = sum(len(gaps(bars, begin_s, end_s)) for bars in rows)
    assert drawn.count('class="idle"') == idle
    for each in ElementTree.fromstring(drawn).iter(f"{SVG}rect"):
        assert float(each.get("x", 0)) + float(each.get("width", 0)) <= WIDTH


def test_an_svg_names_what_it_shows() -> None:
    drawn = svg(GPIPE, title="gpipe <3>", subtitle="3 ranks", names=["first", "second", "third"])
    root = ElementTree.fromstring(drawn)
    said = [each.text for each in root.iter(f"{SVG}text")]
    assert said[:2] == ["gpipe <3>", "3 ranks"]
    assert {"forward", "backward", "idle", "first", "second", "third"} <= set(said)
    assert "message" not in said
    assert "gradient of weights" not in said
    assert len(cells(drawn)) == 18
    assert cells(drawn)[0][0].text == "first: F0.0, 0 to 1 s"
    widths = [float(each.get("width", 0)) for each in cells(drawn)]
    assert widths[3] == pytest.approx(2 * widths[0], abs=0.02)  # a backward takes two forwards


def test_an_svg_tells_messages_and_times_in_its_unit() -> None:
    bars = [Bar("F", 0, 0, 7.0, 7.002), Bar("send", 1, 0, 7.002, 7.003)]
    drawn = svg([bars], title="t", unit="ms")
    assert [each[0].text for each in cells(drawn)] == [
        "rank 0: F0.0, 0 to 2 ms",
        "rank 0: send of micro-batch 0 for stage 1, 2 to 3 ms",
    ]
    assert ">message<" in drawn
    said = [each.text for each in ElementTree.fromstring(drawn).iter(f"{SVG}text")]
    assert said[-7:] == ["0 ms", "0.5", "1", "1.5", "2", "2.5", "3"]  # round numbers
