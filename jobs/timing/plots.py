"""Timed rows as bars: a panel for each model, the median of each pass and precision, the interval over launches."""

from pathlib import Path
from typing import Final

from muster.jobs.measuring.figures import NothingToPlotError, drawing
from muster.jobs.timing.records import Timings
from muster.jobs.timing.rows import rows_of

WIDTH: Final = 6.5  # inches
BAR: Final = 0.32


def plot(timings: Timings, path: Path) -> None:
    """Draw the rows of one or several runs into a file.

    Raises:
        NothingToPlotError: no row has a time.
        RunFolderError, StorageError: it cannot be written.
    """
    panels: dict[str, list[tuple[str, float, float, float, int]]] = {}  # name, median, below it, above it (ms), run
    for run, timing in enumerate(timings.timings):
        for row in rows_of(timing):
            if row.p50_us is not None and row.low_us is not None and row.high_us is not None:
                name = f"{row.timed.pass_name} {row.timed.precision}"
                times = (row.p50_us / 1e3, (row.p50_us - row.low_us) / 1e3, (row.high_us - row.p50_us) / 1e3)
                panels.setdefault(row.timed.model, []).append((name, *times, run))
    if not panels:
        raise NothingToPlotError("no row has a time")
    counts = [len(bars) for bars in panels.values()]
    with drawing(path, WIDTH, BAR * sum(counts) + 0.9 * len(counts)) as figure:
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[count + 1 for count in counts])[:, 0]
        for axis, (model, bars) in zip(axes, panels.items(), strict=True):
            names, medians, below, above, runs = zip(*bars, strict=True)
            axis.barh(range(len(bars)), medians, xerr=(below, above), color=[f"C{run % 10}" for run in runs], capsize=2)
            several = len(timings.timings) > 1
            labels = [f"{name} [{run + 1}]" if several else name for name, run in zip(names, runs, strict=True)]
            axis.set_yticks(range(len(bars)), labels)
            axis.invert_yaxis()
            axis.set_title(model)
        axes[-1].set_xlabel("time of a step (ms): median and interval over launches")
