"""Plots: a file of the kind that its name says, the same bytes for the same rows, and a word where there is none."""

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from muster.collectives_bench.records import BenchCell, Result
from muster.collectives_bench.results import plots
from muster.collectives_bench.results.rows import rows_of
from muster.collectives_bench.sizes import size_text
from muster.jobs.basics.errors import RunFolderError
from support.measured import block, result, settings, world

pytestmark = pytest.mark.slow

ROWS = rows_of(result(settings(operation=["all_reduce", "all_gather"], places="both")))


@pytest.mark.parametrize(("suffix", "begin"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_same_rows_make_the_same_file_of_the_kind_that_its_name_says(suffix, begin, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.{suffix}" for name in ("one", "two")]
    for path in paths:
        plots.plot(ROWS, path)
    first, second = (path.read_bytes() for path in paths)
    assert first.startswith(begin)
    assert first == second


def kept_figures(monkeypatch) -> list[Any]:
    """Keep the figures that are drawn from now on."""
    figures = []
    draw = plots.drawing

    @contextmanager
    def keeping(*arguments):
        with draw(*arguments) as figure:
            figures.append(figure)
            yield figure

    monkeypatch.setattr(plots, "drawing", keeping)
    return figures


def test_a_grid_has_a_column_for_each_world_and_two_rows_for_each_type(tmp_path: Path, monkeypatch) -> None:
    figures = kept_figures(monkeypatch)
    worlds = [world(1, 2), world(2, 1), world(2, 2)]
    plots.plot(rows_of(result(settings(dtypes=["fp32", "bf16"]), worlds)), tmp_path / "grid.png")
    (figure,) = figures
    assert len(figure.axes) == 3 * 4
    assert [panel.get_title() for panel in figure.axes[:3]] == [
        "1 node x 2 ranks, gloo on cpu",
        "2 nodes x 1 rank, gloo on cpu",
        "2 nodes x 2 ranks, gloo on cpu",
    ]
    labels = [panel.get_ylabel() for panel in figure.axes[::3]]
    assert labels == ["fp32\nbusbw (GB/s)", "fp32\ntime", "bf16\nbusbw (GB/s)", "bf16\ntime"]
    assert all(panel.get_xscale() == panel.get_yscale() == "log" for panel in figure.axes)
    ticks = [tick.get_text() for tick in figure.axes[-1].get_xticklabels()]
    assert ticks == ["1 MB", "4 MB"]


def test_over_ranks_a_line_is_an_operation_and_a_size_and_a_column_a_backend(tmp_path: Path, monkeypatch) -> None:
    figures = kept_figures(monkeypatch)
    rows = rows_of(result(settings(), [world(1, 2), world(1, 4), world(1, 8)]))
    plots.plot(rows, tmp_path / "ranks.png", "ranks")
    panels = figures[0].axes
    assert [panel.get_title() for panel in panels] == ["gloo on cpu", ""]
    assert [line.get_label() for line in panels[1].get_lines()] == ["all_reduce 1 MB", "all_reduce 4 MB"]
    assert [list(line.get_xdata()) for line in panels[1].get_lines()] == [[2, 4, 8]] * 2
    assert panels[1].get_xlabel() == "ranks"


def test_every_line_is_a_way_with_its_interval_as_a_band(tmp_path: Path, monkeypatch) -> None:
    figures = kept_figures(monkeypatch)
    plots.plot(ROWS, tmp_path / "one.png")
    panel = figures[0].axes[1]
    assert [line.get_label() for line in panel.get_lines()] == ["all_reduce", "all_gather in", "all_gather out"]
    assert list(panel.get_lines()[0].get_ydata()) == [row.p50_us for row in ROWS[:2]]
    assert len(panel.collections) == 3


def test_rows_without_size_or_time_are_no_plot(tmp_path: Path) -> None:
    barrier = BenchCell(operation="barrier", dtype="fp32", asked_bytes=0, place="in")
    cell = BenchCell(operation="reduce", dtype="fp32", asked_bytes=1024, place="in")
    failed = block(world(), cell, state="failed", reason="SIGABRT")
    rows = rows_of(Result(blocks=[block(world(), barrier), failed]))
    with pytest.raises(plots.NothingToPlotError, match="no row has a size and a time"):
        plots.plot(rows, tmp_path / "none.png")
    assert not list(tmp_path.iterdir())


def test_one_rank_has_a_time_and_no_bus(tmp_path: Path) -> None:
    plots.plot(rows_of(result(worlds=[world(1, 1)])), tmp_path / "alone.svg")
    assert (tmp_path / "alone.svg").stat().st_size > 10_000


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"gone/one\.png: cannot write here"):
        plots.plot(ROWS, tmp_path / "gone" / "one.png")


def test_of_many_sizes_only_those_are_named_that_fit() -> None:
    sizes = [2**power for power in range(3, 31)]

    class Panel:
        def set_xticks(self, ticks, labels=(), minor=False) -> None:
            if not minor:
                self.ticks, self.labels = ticks, labels

    panel = Panel()
    plots._name_values_below(panel, sizes, size_text)
    assert min(panel.ticks) == 8
    assert max(panel.ticks) == 2**30
    assert len(panel.ticks) <= plots.MOST_TICKS + 1
    plots._name_values_below(panel, [4096], size_text)
    assert panel.labels == ["4 KB"]
