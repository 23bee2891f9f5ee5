"""Plot timed rows: a panel per model, a bar per pass and precision with the median and its interval over launches."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from muster.jobs.measuring.figures import NothingToPlotError, drawing
from muster.jobs.timing.records import Timings
from muster.jobs.timing.rows import ModelRow, rows_of

WIDTH: Final = 6.5  # inches
BAR: Final = 0.32


def plot(timings: Timings, path: Path) -> None:
    """Plot the rows of one or several runs to a file.

    Raises:
        NothingToPlotError: if no row has a time.
        RunFolderError, StorageError: if the file cannot be written.
    """
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
