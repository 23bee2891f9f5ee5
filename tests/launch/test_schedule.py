"""`muster schedule`: what it draws and tells, as JSON and as SVG, and what a user sees of mistakes."""

import functools
import itertools
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.launch.look import schedule_view as command
from muster.pipe.schedules.simulate import bubble_formula
from muster.pipe.schedules.tables import SCHEDULES

Draw = Callable[..., tuple[int, str, str]]


@pytest.fixture
def draw(in_process: Draw) -> Draw:
    """Return a function that runs `muster schedule ...`: (code, out, err)."""
    return functools.partial(in_process, "schedule")


def test_1f1b_as_it_is_drawn(draw: Draw) -> None:
    assert draw("1f1b", "-p", "2", "-m", "3") == (
        0,
        """\
rank 0  F0 F1 ......B0--- F2 B1--- ...B2---
rank 1  ...F0 B0--- F1 B1--- F2 B2--- ......

F forward, B backward, . idle, number: micro-batch

1f1b: one forward, one backward in turn; memory for as many micro-batches as stages; 2 ranks, 3 micro-batches
makespan   12
bubble     25.0 % simulated, 25.0 % by (p - 1) / (m + p - 1)
in flight  at most 2 1 micro-batches, by rank
""",
        "",
    )


def test_all_schedules_beside_each_other(draw: Draw) -> None:
    code, out, _ = draw()
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines] == ["schedule", *SCHEDULES]
    table = {line.split()[0]: line.split()[1:10] for line in lines}
    assert table["gpipe"] == ["4", "33", "27.3", "%", "27.3", "%", "8", "8", "8"]
    assert table["interleaved"] == ["8", "28.5", "15.8", "%", "15.8", "%", "5.5", "4.5", "3.5"]
    assert [each["schedule"] for each in json.loads(draw("--json")[1])] == list(SCHEDULES)


def test_costs_are_those_of_a_rank_and_messages_take_time(draw: Draw) -> None:
    def makespan(*arguments: str) -> float:
        return json.loads(draw(*arguments, "--json")[1])["makespan_s"]

    assert makespan("gpipe", "-p", "1", "-m", "1", "--costs", "2,3,4") == 9
    assert makespan("zbv", "-p", "1", "-m", "1", "--costs", "2,3,4") == 9  # two stages of half of it
    assert makespan("model", "-p", "2", "-m", "1", "--costs", "2,3,4", "--message", "0.5") == 2 * 9 + 2 * 0.5
    assert makespan("interleaved", "-p", "1", "-m", "1", "--chunks", "3") == pytest.approx(3)


def test_an_idle_rank_shows_the_message_it_waits_for(draw: Draw) -> None:
    drawn = draw("gpipe", "-p", "2", "-m", "1", "--message", "1")[1]
    assert drawn.splitlines()[:2] == [
        "rank 0  F0 ............~~~B0---",
        "rank 1  ...~~~F0 B0--- .........",
    ]
    assert "~ idle, a message in transit" in drawn


def test_json_has_what_is_drawn(draw: Draw) -> None:
    found = json.loads(draw("1f1b", "-p", "2", "-m", "2", "--json")[1])
    assert found["actions"] == [["F0.0", "F0.1", "B0.0", "B0.1"], ["F1.0", "B1.0", "F1.1", "B1.1"]]
    assert [span["step"] for span in found["spans"][1]] == found["actions"][1]
    assert found["spans"][1][0] == {"step": "F1.0", "start_s": 1, "end_s": 2}
    assert found["messages"][0] == [
        {"step": ">a1.0", "start_s": 1, "end_s": 1},
        {"step": ">a1.1", "start_s": 2, "end_s": 2},
    ]
    assert (found["bubble"], found["bubble_formula"]) == pytest.approx((1 / 3, 1 / 3))
    assert (found["rank_of"], found["peak_in_flight"]) == ([0, 1], [2, 1])


def test_a_flush_makes_bubbles_of_gpipe_and_1f1b_alike_and_their_activations_not(draw: Draw) -> None:
    """K devices, M micro-batches: (K - 1) / (M + K - 1) idle; M activations against min(M, K - stage)."""
    for devices, microbatches in ((3, 2), (3, 1), (4, 8)):
        arguments = ("-p", str(devices), "-m", str(microbatches), "--json")
        gpipe, alternating = (json.loads(draw(name, *arguments)[1]) for name in ("gpipe", "1f1b"))
        idle = (devices - 1) / (microbatches + devices - 1)
        assert (gpipe["bubble"], alternating["bubble"]) == pytest.approx((idle, idle))
        assert gpipe["peak_in_flight"] == [microbatches] * devices
        assert alternating["peak_in_flight"] == [min(microbatches, devices - stage) for stage in range(devices)]


@pytest.mark.parametrize("message", ["0", "0.5"])
def test_an_svg_of_every_cell(draw: Draw, tmp_path: Path, message: str) -> None:
    file = tmp_path / "zbv.svg"
    code, _, err = draw("zbv", "-p", "2", "-m", "3", "--message", message, "--svg", str(file))
    assert (code, err) == (0, f"muster: wrote {file}\n")
    classes = [each.get("class", "") for each in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}rect")]
    found = [kind.split()[1] for kind in classes if kind.startswith("cell ")]
    assert [found.count(kind) for kind in ("F", "I", "W")] == [12, 12, 12]
    assert found.count("receive") == (0 if message == "0" else 12)  # the two stages at the foot of the V share a rank


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_the_formulas_that_are_shown_are_those_that_are_computed(draw: Draw, name: str) -> None:
    assert set(command.FORMULAS) == set(SCHEDULES)
    for ranks, microbatches, chunks in ((1, 1, 2), (2, 5, 2), (4, 8, 3), (3, 3, 1)):
        shown = eval(command.FORMULAS[name], {"p": ranks, "m": microbatches, "v": chunks, "s": 1})
        assert bubble_formula(name, ranks, microbatches, chunks) == pytest.approx(shown)
    few = draw("interleaved", "-p", "4", "-m", "2")[1]
    assert "55.6 % simulated, 55.6 % by the formula for so few micro-batches\n" in few


def test_times_of_a_micro_batch_are_divided_among_its_slices(draw: Draw) -> None:
    whole = json.loads(draw("terapipe", "-p", "2", "-m", "3", "--slices", "1", "--json")[1])
    sliced = json.loads(draw("terapipe", "-p", "2", "-m", "3", "--slices", "4", "--json")[1])
    assert (whole["microbatches"], sliced["microbatches"], sliced["slices"]) == (3, 3, 4)
    assert (whole["makespan_s"], sliced["makespan_s"]) == (9 * 4 / 3, 9 * 13 / 12)  # 9 of work, and the fill
    assert sliced["peak_in_flight"] == [3.0, 3.0]


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_formula_is_shown_where_it_gives_the_number_beside_it_and_nowhere_else(name: str) -> None:
    """zb1p of 3 ranks and 1 micro-batch once said 57.1 % by (p - 1) / (3 * m + p - 1), which is 40 %."""
    for ranks, microbatches in itertools.product(range(1, 9), range(1, 18)):
        number = bubble_formula(name, ranks, microbatches)
        record = {"schedule": name, "ranks": ranks, "microbatches": microbatches, "bubble_formula": number}
        said = command.bubbles({**record, "bubble": number, "bubble_without_barrier": number})
        by_formula = eval(command.FORMULAS[name], {"p": ranks, "m": microbatches, "v": 2, "s": 1})
        assert (command.FORMULAS[name] in said) is (number == pytest.approx(by_formula)), (ranks, microbatches)


def test_on_a_terminal_it_is_coloured_and_as_wide_as_that(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in draw("gpipe")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    drawn = draw("gpipe")[1].partition("\n\n")[0]
    assert "\x1b[" not in drawn
    assert max(map(len, drawn.splitlines())) <= 40


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["1f2b"], f"unknown schedule '1f2b'; did you mean '1f1b'? (valid: {', '.join(SCHEDULES)})"),
        (["x"], f"unknown schedule 'x' (valid: {', '.join(SCHEDULES)})"),
        (["gpipe", "-p", "0"], "-p: must be at least 1, got 0"),
        (["gpipe", "-m", "-1"], "-m: must be at least 1, got -1"),
        (["interleaved", "--chunks", "0"], "--chunks: must be at least 1, got 0"),
        (["zbv", "--slices", "2"], "--slices 2: zbv does not slice sequences; leave it out, or draw terapipe"),
        (["zbv", "--chunks", "2"], "--chunks 2: the stages per rank of zbv are fixed at 2; leave it out"),
        (
            ["1f1b", "-p", "100000", "-m", "100000"],  # computed for ever once, and filled the memory
            "-p 100000 -m 100000: has 20000000000 forward and backward actions, "
            "more than the limit of 300000; lower -m or -p",
        ),
        (["gpipe", "--costs", "1,2"], "--costs 1,2: must be three times, for F, I and W, such as 1,1,1"),
        (
            ["gpipe", "--costs", "1,,2"],
            "--costs 1,,2: nothing is not a time; expected 0, or a number from 1e-09 to 1e+09",
        ),
        (
            ["gpipe", "--costs", "1,nan,2"],
            "--costs 1,nan,2: nan is not a time; expected 0, or a number from 1e-09 to 1e+09",
        ),
        (["gpipe", "--costs=-1,1,1"], "--costs -1,1,1: -1 is not a time; expected 0, or a number from 1e-09 to 1e+09"),
        (
            ["gpipe", "--costs", "1,1,1e308"],  # sums were infinite once: a stack of Python's
            "--costs 1,1,1e308: 1e308 is not a time; expected 0, or a number from 1e-09 to 1e+09",
        ),
        (["gpipe", "--costs", "0,0,0"], "--costs 0,0,0: at least one time must be above 0"),
        (
            ["gpipe", "--message", "fast"],
            "--message fast: fast is not a time; expected 0, or a number from 1e-09 to 1e+09",
        ),
        (["--svg", "a.svg"], f"--svg a.svg: draws one schedule; name one of {', '.join(SCHEDULES)}"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(draw: Draw, arguments: list[str], said: str) -> None:
    assert draw(*arguments) == (2, "", f"muster: {said}\n")


def test_a_file_that_cannot_be_written_is_one_line(draw: Draw, tmp_path: Path) -> None:
    file = tmp_path / "none" / "a.svg"
    assert draw("gpipe", "--svg", str(file)) == (
        73,
        "",
        f"muster: {file}: cannot be written: no such file or directory\n",
    )
