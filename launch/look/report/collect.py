"""Collection of a report's content: rows, pictures and runs. The page names parts that could not be read."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.words import counted
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import screen
from muster.launch.look import predicted
from muster.launch.look.comparison import RunRow
from muster.launch.look.comparison_view import COLUMNS, LEGEND, cells, notes
from muster.launch.look.history import AttemptHistory
from muster.launch.look.report.page import ReportPage
from muster.launch.look.report.pictures import Styles, pictures, timeline_of
from muster.launch.look.report.runs import RunView, view_of_run
from muster.launch.look.report.tables import table

if TYPE_CHECKING:
    from muster.launch.sweeps.rows import ChosenRows

MOST_RUNS: Final = 40  # maximum number of runs with a section of their own
MOST_PROFILES: Final = 4


@dataclass(frozen=True)
class About:
    """The title of a report, the command that made it, and the version of Muster."""

    title: str
    command: str
    version: str


def collect(
    about: About,
    chosen: "ChosenRows",
    why_of: Callable[[RunDir], tuple[AttemptHistory, str]],
    styles: Styles,
    advice: Mapping[str, Any] | None = None,
) -> ReportPage:
    """Read the runs and draw their pictures. `advice` has predictions of their steps."""
    rows, runs, left_out = chosen.rows, chosen.runs, [f"not compared: {each}" for each in chosen.missing]
    if len(runs) > MOST_RUNS:
        left_out.append(
            f"of {len(runs)} runs, the first {MOST_RUNS} are described below; for another one, report that run alone"
        )
    if len(runs) > MOST_PROFILES:
        left_out.append(f"only the first {MOST_PROFILES} runs show profiles; for another one, report that run alone")
    views = [
        view_of_run(run, why_of, styles, profile=place < MOST_PROFILES) for place, run in enumerate(runs[:MOST_RUNS])
    ]
    peaks = {view.run_id: view.peak_formula for view in views}
    formulas = {row.label: peak for row in rows if (peak := peaks.get(row.run_ids[0])) is not None}
    parts = [] if advice is None else predicted.beside(advice, chosen)
    left_out += [] if advice is None else predicted.missing(parts, chosen)
    caption = "Predicted and measured parts of a step"
    return ReportPage(
        title=about.title,
        lead=lead_of(rows, views),
        made=screen.clock(time.time()),
        version=about.version,
        command=about.command,
        rows=rows,
        comparison=table("Steps, without warm-up", COLUMNS, map(cells, rows)) if rows else None,
        predicted=table(caption, predicted.COLUMNS, predicted.table_rows(parts)) if parts else None,
        notes=[*left_out, *(notes(rows) if rows else ()), " ".join(LEGEND.split())],
        pictures=[*pictures(rows, chosen.groups, chosen.whole, formulas, styles), timeline_of(chosen.folders, styles)],
        runs=views,
        records=[_finite(row.record()) for row in rows],
    )


def lead_of(rows: Sequence[RunRow], runs: Sequence[RunView]) -> str:
    """Summarize the most important result in one or two sentences."""
    failed = [run.run_id for run in runs if not run.ended_well]
    parts = (
        [f"{counted(len(failed), 'run')} of {len(runs)} did not end well: {', '.join(failed[:3])}."] if failed else []
    )
    baseline = next((row.label for row in rows if row.verdict == "baseline"), "")
    others = [row for row in rows if row.label != baseline and row.speedup is not None]
    if others:
        best = max(others, key=lambda row: row.speedup or 0.0)
        only = "" if (best.speedup or 0.0) > 1.0 else "only "
        parts.append(f"{best.label} has {only}{best.speedup:.2f} times the rate of {baseline}: {best.verdict}.")
    elif rows:
        first, share = rows[0], rows[0].parts_s["communication"] / rows[0].mean_s
        took = f"A step of {first.label} takes {1e3 * first.median_s:.2f} ms on {counted(first.ranks, 'rank')}"
        parts.append(f"{took}, {first.rate:,.0f} {first.unit}; exposed communication is {share:.0%} of it.")
    return " ".join(parts) or f"{counted(len(runs), 'run')}, none with steps to compare."


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
