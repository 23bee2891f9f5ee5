"""Plot timed rows.

models   a panel per model, a bar per pass and precision with the median and its interval over launches
norms    a panel per pass and precision, a line per norm: bandwidth over the width of the rows
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from muster.jobs.measuring.figures import NothingToPlotError, drawing
from muster.jobs.timing.records import Timings
from muster.jobs.timing.rows import ModelRow, rows_of
from muster.jobs.timing.settings import COPY

WIDTH: Final = 6.5  # inches
BAR: Final = 0.32
PANEL: Final = 3.0


def plot(timings: Timings, path: Path) -> None:
    """Plot the rows of one or several runs to a file.

    Raises:
        NothingToPlotError: if no row has a time.
        RunFolderError, StorageError: if the file cannot be written.
    """
    if any(timing.header.settings.widths for timing in timings.timings):
        _plot_norms(timings, path)
        return
    panels: dict[str, dict[str, list[tuple[int, ModelRow]]]] = {}  # model -> name -> (number of the run, row)
    for run, timing in enumerate(timings.timings):
        for row in rows_of(timing):
            if row.is_measured:
                name = f"{row.timed.pass_name} {row.timed.precision}"
                panels.setdefault(row.timed.model, {}).setdefault(name, []).append((run, row))
    if not panels:
        raise NothingToPlotError("no row has a time")
    counts = [sum(map(len, names.values())) for names in panels.values()]
    with drawing(path, WIDTH, BAR * sum(counts) + 0.9 * len(counts)) as figure:
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[count + 1 for count in counts])[:, 0]
        for axis, (model, names) in zip(axes, panels.items(), strict=True):
            _draw(axis, names, several=len(timings.timings) > 1)
            axis.set_title(model)
        axes[-1].set_xlabel("time of a step (ms): median and interval over launches")


def _draw(axis: Any, names: Mapping[str, Sequence[tuple[int, ModelRow]]], *, several: bool) -> None:
    bars = [(name, run, row) for name, rows in names.items() for run, row in rows]
    for place, (_, run, row) in enumerate(bars):
        median, low, high = ((us or 0.0) / 1e3 for us in (row.p50_us, row.low_us, row.high_us))
        axis.barh(place, median, xerr=[[median - low], [high - median]], color=f"C{run % 10}", capsize=2)
    axis.set_yticks(range(len(bars)), [f"{name} [{run + 1}]" if several else name for name, run, _ in bars])
    axis.invert_yaxis()


def _plot_norms(timings: Timings, path: Path) -> None:
    panels: dict[tuple[str, str], dict[str, list[tuple[int, float]]]] = {}  # (pass, precision) -> norm -> (width, GB/s)
    for run, timing in enumerate(timings.timings):
        passes = [each for each in timing.header.settings.passes if each != "step"]
        for row in sorted(timing.rows, key=lambda row: row.width or 0):
            norm = f"{row.model} [{run + 1}]" if len(timings.timings) > 1 else row.model
            for pass_name in passes if row.model == COPY else [row.pass_name]:  # the copy is drawn in every panel
                if row.width is not None and row.bytes_per_s is not None:
                    panel = panels.setdefault((pass_name, row.precision), {})
                    panel.setdefault(norm, []).append((row.width, row.bytes_per_s / 1e9))
    if not panels:
        raise NothingToPlotError("no row has a time")
    with drawing(path, WIDTH, PANEL * len(panels)) as figure:
        for axis, (name, norms) in zip(
            figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels.items(), strict=True
        ):
            for norm, points in norms.items():
                axis.plot(*zip(*points, strict=True), "k--" if norm.startswith(COPY) else "o-", label=norm)
            widths = sorted({width for points in norms.values() for width, _ in points})
            axis.set_xscale("log", base=2)
            axis.set_xticks(widths, [str(width) for width in widths], rotation=30)
            axis.minorticks_off()
            axis.set(title=" ".join(name), ylabel="GB/s", ylim=(0.0, None))
            axis.legend()
        axis.set_xlabel("width of a row")
