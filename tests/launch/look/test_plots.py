"""`muster plot`: the data of every kind, what is drawn of it, hostile names, and the same numbers everywhere."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from PIL import Image

from muster.jobs.basics.errors import RefusedError
from muster.jobs.measuring.figures import NothingToPlotError
from muster.launch.cli import main
from muster.launch.look.comparison import RunRow, compared
from muster.launch.look.plots.draw import draw, inline_svg, page_css, save
from muster.launch.look.plots.series import Plot, PlotSeries, plot_of
from muster.launch.look.plots.thin import MOST_POINTS, thinned
from muster.launch.look.steps import PARTS, Measured, read_measured
from support.measured_runs import make_run

pytestmark = pytest.mark.command

HOSTILE = r"_$\frac{</title><script>alert(1)</script>&#0;" + "\x1b[31m\u202e" + 60 * "long "
Made = tuple[Path, list[RunRow], dict[str, list[Measured]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Three repeats of ddp on 1 and 2 ranks, and one run of flat on 2."""
    root = tmp_path_factory.mktemp("runs")
    groups = {
        f"ddp={ranks}": [
            read_measured(make_run(root, f"ddp-{ranks}-{turn}", 0.1 + 0.01 * ranks, ranks=ranks, began=float(turn)))
            for turn in range(3)
        ]
        for ranks in (1, 2)
    }
    groups["flat"] = [read_measured(make_run(root, "flat", 0.15, mode="flat"))]
    return root, compared(groups, "ddp=1"), groups


def drawn(plot: Plot) -> list[Any]:
    figure = Figure()
    draw(plot, figure)
    figure.draw_without_rendering()
    return list(figure.axes)


def widths(axes: Any) -> list[list[float]]:
    """Return the bars, color by color."""
    return [[bar.get_width() for bar in bars] for bars in axes.containers if hasattr(bars, "patches")]


def test_split_time_stacks_the_parts_of_compare_s_step(made: Made) -> None:
    _, rows, groups = made
    plot = plot_of("split_time", rows, groups)
    *parts, step = plot.series
    assert {each.label: each.y for each in parts} == {part: tuple(row.parts_s[part] for row in rows) for part in PARTS}
    assert list(zip(step.y, step.low or (), step.high or (), strict=True)) == [
        (row.median_s, row.low_s, row.high_s) for row in rows
    ]
    (axes,) = drawn(plot)
    for widths_of, part in zip(widths(axes), parts, strict=True):
        assert widths_of == pytest.approx([1e3 * value for value in part.y], rel=1e-12)
    ends = [bar.get_x() + bar.get_width() for bar in axes.containers[len(PARTS) - 1].patches]
    assert ends == pytest.approx([1e3 * row.mean_s for row in rows])
    assert [text.get_text() for text in axes.get_yticklabels()] == ["ddp=1", "ddp=2", "flat"]
    assert len({bars.patches[0].get_facecolor() for bars in axes.containers[: len(PARTS)]}) == len(PARTS)


def test_throughput_has_a_color_for_each_mode_and_intervals_over_repeats(made: Made) -> None:
    _, rows, groups = made
    plot = plot_of("throughput", rows, groups)
    assert [(each.label, each.x) for each in plot.series] == [("ddp", ("ddp=1", "ddp=2")), ("flat", ("flat",))]
    assert [rate for each in plot.series for rate in each.y] == [row.rate for row in rows]
    for each in plot.series:
        for low, rate, high in zip(each.low or (), each.y, each.high or (), strict=True):
            assert low <= rate <= high
    assert widths(drawn(plot)[0]) == [[row.rate for row in rows[:2]], [rows[2].rate]]


def test_scaling_has_the_ideal_line_and_compare_s_efficiency(made: Made) -> None:
    _, rows, groups = made
    ddp = rows[:2]
    plot = plot_of("scaling", ddp, groups)
    rate, ideal = plot.series
    assert (rate.x, rate.y, rate.label) == ((1.0, 2.0), tuple(row.rate for row in ddp), "ddp")
    assert ideal.y == (ddp[0].rate, 2 * ddp[0].rate)
    assert plot.below is not None
    assert plot.below.series[0].y == tuple(row.efficiency for row in ddp)
    above, below = drawn(plot)
    assert list(above.lines[0].get_ydata()) == list(rate.y)
    assert list(below.lines[0].get_ydata()) == [100 * (row.efficiency or 0.0) for row in ddp]
    of_flat = plot_of("scaling", rows, groups, baseline="ddp=1")
    assert [each.y[0] for each in of_flat.series if each.role == "reference"][-1] == 2 * ddp[0].rate
    with pytest.raises(NothingToPlotError, match="rows of one mode with different numbers of ranks"):
        plot_of("scaling", rows[1:], groups)
    same = {"a": groups["ddp=1"][:1], "b": groups["ddp=1"][1:]}
    with pytest.raises(NothingToPlotError, match=r"a and b are both ddp on 1 rank; leave one out"):
        plot_of("scaling", compared(same, "a"), same)


def test_scaling_tells_batches_apart(tmp_path: Path) -> None:
    groups: dict[str, list[Measured]] = {}
    for ranks in (1, 2):
        for batch in (16, 32):
            run = make_run(tmp_path, f"{ranks}-{batch}", ranks=ranks, began=float(batch))
            run.job.write_text(run.job.read_text().replace("batch_size: 16", f"batch_size: {batch}"))
            groups[f"{ranks}-{batch}"] = [read_measured(run)]
    plot = plot_of("scaling", compared(groups, "1-16"), groups)
    assert [each.label for each in plot.series][:2] == ["ddp, batch 16", "ddp, batch 32"]


def test_losses_against_time_begin_with_the_first_step(made: Made) -> None:
    _, rows, groups = made
    plot = plot_of("loss_time", rows, groups)
    for each, row in zip(plot.series, rows, strict=True):
        first, *_, last = groups[row.label][0].steps
        assert each.y[-1] == last.loss
        assert each.x[0] == pytest.approx(first.seconds)
        assert each.x[-1] == pytest.approx(last.time - first.time + first.seconds)


def test_losses_are_a_line_for_each_row_and_long_ones_are_thinned_for_drawing_only(made: Made) -> None:
    _, rows, groups = made
    plot = plot_of("loss", rows, groups)
    assert [each.label for each in plot.series] == ["ddp=1", "ddp=2", "flat"]
    assert [each.y[-1] for each in plot.series] == [row.final_loss for row in rows]
    assert plot.series[0].low == plot.series[0].high == plot.series[0].y
    assert plot.series[2].low is None
    spiky = tuple(50.0 if x == 7777 else -50.0 if x == 3333 else x % 7 for x in range(10_000))
    steps = tuple(map(float, range(1, 10_001)))
    long = PlotSeries("long", steps, spiky, tuple(y - 1 for y in spiky), tuple(y + 1 for y in spiky))
    short = thinned(long)
    assert len(short.x) == len(short.y) <= MOST_POINTS + 2
    assert (short.x[0], short.x[-1], min(short.y), max(short.y)) == (1.0, 10_000.0, -50.0, 50.0)
    assert (min(short.low or ()), max(short.high or ())) == (-51.0, 51.0)
    (axes,) = drawn(Plot("loss", "Loss", "step", "loss", (long,)))
    assert tuple(axes.lines[0].get_ydata()) == short.y


def test_memory_stands_beside_the_formula_and_rows_without_it_are_named(made: Made) -> None:
    _, rows, groups = made
    with pytest.raises(NothingToPlotError, match="no memory recorded in ddp=1, ddp=2, flat"):
        plot_of("memory", rows, groups)
    peaks = [replace(run, peak_bytes=(3 + turn) << 20) for turn, run in enumerate(groups["ddp=1"])]
    some = {**groups, "ddp=1": peaks}
    plot = plot_of("memory", compared(some, "ddp=1"), some, formulas={"ddp=1": 2.5 * (1 << 20)})
    measured, formula = plot.series
    assert (measured.y, measured.low, measured.high) == ((5 << 20,), (3 << 20,), (5 << 20,))
    assert "left out: ddp=2, flat (no memory recorded)" in plot.note
    assert widths(drawn(plot)[0]) == [[5.0], [2.5]]
    assert formula.role == "reference"


@pytest.fixture
def hostile(made: Made) -> Iterator[Plot]:
    _, _, groups = made
    own = {HOSTILE: groups["flat"], "_": groups["ddp=1"]}
    return plot_of("loss", compared(own, "_"), own)


def test_hostile_names_are_shown_literally_and_shortened(hostile: Plot) -> None:
    figure = Figure()
    draw(hostile, figure)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names[1] == "_"
    assert names[0].startswith(r"_$\frac{</title><s")
    assert len(names[0]) <= 40
    assert not any(text.get_parse_math() for text in figure.legends[0].get_texts())


def test_a_page_s_svg_has_no_color_of_its_own_no_foreign_markup_and_unique_ids(hostile: Plot, made: Made) -> None:
    texts = [inline_svg(hostile), inline_svg(plot_of("split_time", made[1], made[2]))]
    ids: list[str] = []
    for text in texts:
        assert "<?xml" not in text
        root = ElementTree.fromstring(text)
        assert root.get("fill") == "currentColor"  # matplotlib leaves black fills out
        tags = {each.tag.rpartition("}")[2] for each in root.iter()}
        assert tags <= {
            "svg",
            "title",
            "desc",
            "defs",
            "g",
            "path",
            "text",
            "tspan",
            "use",
            "clipPath",
            "rect",
            "pattern",
        }
        ids += [each.get("id", "") for each in root.iter() if each.get("id")]
        for each in root.iter():
            for value in each.attrib.values():
                bare = value.replace(" ", "")
                assert (
                    "#" not in bare.replace("url(#", "").replace("var(--plot", "") or "var(" in bare or value[0] == "#"
                )
            if (link := each.get("href")) is not None:
                assert link.removeprefix("#") in ids
        assert any(each.tag.endswith("}text") for each in root.iter())
    assert len(ids) == len(set(ids))
    assert "--plot-1:" in page_css()
    assert texts[0] == inline_svg(hostile)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_files_hold_the_command_and_are_otherwise_the_same(made: Made, tmp_path: Path, suffix: str) -> None:
    plot = plot_of("throughput", made[1], made[2])
    files = [tmp_path / f"{name}{suffix}" for name in "abc"]
    for file, command in zip(files, ("muster plot one", "muster plot one", "muster 'é\x1b' \udcff"), strict=True):
        save(plot, file, command)
    first, again, other = (file.read_bytes() for file in files)
    assert first == again != other
    if suffix == ".png":
        with Image.open(files[0]) as image:
            assert image.text["Description"] == "muster plot one"  # type: ignore[attr-defined]
    else:
        assert b"muster plot one" in first
    if suffix == ".svg":
        ElementTree.fromstring(other)


def test_compare_plot_and_json_agree_to_the_digit(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _, groups = made
    words = ["--runs", str(root), *(f"{run.run_id}={label}" for label, runs in groups.items() for run in runs)]

    def said(*more: str) -> str:
        assert main([more[0], *more[1:], *words] if more[0] == "plot" else [*more, *words]) == 0
        return capsys.readouterr().out

    rows = json.loads(said("compare", "--json"))["rows"]
    table = said("compare")
    for kind, field, text in (("split_time", "median_s", "{:.2f}"), ("throughput", "rate", "{:,.0f}")):
        shown = json.loads(said("plot", kind, "--json"))
        assert shown["rows"] == rows
        values = {
            x: y
            for each in shown["plot"]["series"]
            if each["label"] not in PARTS
            for x, y in zip(each["x"], each["y"], strict=True)
        }
        assert values == {row["label"]: row[field] for row in rows}
        plotted = said("plot", kind)
        for row in rows:
            digits = text.format(row[field] * (1e3 if field == "median_s" else 1))
            assert digits in table
            assert digits in plotted
    losses = json.loads(said("plot", "loss", "--json"))["plot"]["series"]
    assert [each["y"][-1] for each in losses] == [row["final_loss"] for row in rows]
    assert losses[0]["x"][0] == 1.0  # warm-up has losses, too
    picture = tmp_path / "scaling.svg"
    assert main(["plot", "scaling", "--output", str(picture), *words[:-1]]) == 0
    assert f"muster plot scaling {words[2]}" in picture.read_text()
    assert capsys.readouterr().err == f"muster: wrote {picture}\n"


def test_what_cannot_be_plotted_is_one_line(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(made[0])
    for words, code, said in (
        (["memory", "flat"], 2, "plot memory: no memory recorded in flat-"),
        (["loss", "flat", "--output", "no/x.png"], 2, "--output no/x.png: no such folder"),
        (["loss", "flat", "--output", "x.gif"], 2, "must end in .png or .svg or .pdf"),
    ):
        assert main(["plot", *words, "--runs", root]) == code
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    many = PlotSeries("many", tuple(f"row {number}" for number in range(300)), tuple(1.0 for _ in range(300)))
    with pytest.raises(NothingToPlotError, match="300 bars are too many for a picture"):
        save(Plot("memory", "", "", "", (many,), "bars"), tmp_path / "x.png", "")


def test_without_matplotlib_the_extra_is_named(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RefusedError, match=r"plots need matplotlib, which .* install the extra `plots`"):
        save(plot_of("loss", made[1], made[2]), tmp_path / "x.png", "")


def test_settings_of_the_current_folder_and_the_user_do_not_count(tmp_path: Path) -> None:
    run, pictures = make_run(tmp_path, "one"), set()
    argv = [sys.executable, "-m", "muster", "plot", "split_time", str(run.path), "-o", "p.png"]
    odd = (b"text.usetex: True\n", b"backend: none\nlines.linewidth: 30\n", b"\xff\xfe")
    for number, settings in enumerate((b"", *odd)):
        (home := tmp_path / f"home-{number}").mkdir()
        if settings:
            (home / "matplotlibrc").write_bytes(settings)
        environment = {**os.environ, "MPLCONFIGDIR": str(home), "MPLBACKEND": "nonsense" if settings else ""}
        done = subprocess.run(argv, cwd=home, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert (done.returncode, "Traceback" in done.stderr, "matplotlibrc" in done.stderr) == (0, False, False)
        pictures.add((home / "p.png").read_bytes())
    assert len(pictures) == 1


def test_a_run_without_steps_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "good")
    make_run(tmp_path, "bad", steps=0)
    assert main(["plot", "throughput", "good", "bad", "--json", "--runs", str(tmp_path)]) == 0
    out, error = capsys.readouterr()
    assert len(json.loads(out)["rows"]) == 1
    assert error.startswith("muster: left out: ")
    assert "no step is recorded" in error
