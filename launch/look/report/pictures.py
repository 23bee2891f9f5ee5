"""The pictures of a report: each is an SVG drawing with its numbers as tables, or the reason why it is missing."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from xml.etree import ElementTree

from muster.jobs.basics.errors import MusterError, NotFoundError
from muster.jobs.measuring.figures import NothingToPlotError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.look.comparison import RunRow
from muster.launch.look.plots.draw import inline_svg
from muster.launch.look.plots.lanes import timeline_plot
from muster.launch.look.plots.series import LOSSES, Groups, Plot, plot_of
from muster.launch.look.report.tables import Table, numbers_of
from muster.launch.look.timelines import read_timeline

KINDS: Final = ("split_time", "throughput", "scaling", "loss", "loss_time", "memory")
MOST_TIMELINES: Final = 4  # maximum number of timelines, drawn one above the other
LONG: Final = re.compile(r"-?\d+\.\d\d+")
SVG: Final = "http://www.w3.org/2000/svg"


@dataclass
class Styles:
    """The `style` attributes of all pictures as CSS classes, because the page's security policy forbids attributes."""

    names: dict[str, str] = field(default_factory=dict)

    def moved(self, svg: str) -> str:
        """Replace the `style` attributes of a picture by classes, and shorten the numbers in its paths."""
        root = ElementTree.fromstring(svg)
        for each in root.iter():
            if path := each.get("d"):  # hatches make paths long, so round their coordinates
                each.set("d", LONG.sub(lambda found: f"{float(found[0]):.1f}", " ".join(path.split())))
            if style := each.attrib.pop("style", None):
                name = self.names.setdefault(style, f"s{len(self.names)}")
                each.set("class", " ".join(filter(None, (each.get("class"), name))))
        ElementTree.register_namespace("", SVG)
        return ElementTree.tostring(root, encoding="unicode")

    def css(self) -> str:
        """Return the CSS rules of the classes."""
        return "".join(f".{name}{{{style}}}" for style, name in self.names.items())


@dataclass(frozen=True)
class Picture:
    """One picture of a page. If it is missing, `why` gives the reason."""

    title: str
    svg: str = ""
    tables: tuple[Table, ...] = ()
    why: str = ""
    plot: Plot | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the plot for JSON, or the reason why it is missing."""
        return self.plot.to_json() if self.plot else {"title": self.title, "why": self.why}


def picture_of(plot: Plot, styles: Styles) -> Picture:
    """Draw a plot for the page; if it is too large to draw, keep only its tables."""
    try:
        svg = styles.moved(inline_svg(plot))
    except NothingToPlotError as error:
        return Picture(plot.title, tables=tuple(numbers_of(plot)), why=str(error), plot=plot)
    return Picture(plot.title, svg, tuple(numbers_of(plot)), plot=plot)


def pictures(
    rows: Sequence[RunRow], groups: Groups, whole: Groups, formulas: Mapping[str, float], styles: Styles
) -> list[Picture]:
    """Draw every kind of plot of the rows. Plots of losses use `whole`, which includes warm-up steps."""
    found = []
    for kind in KINDS if rows else ():
        try:
            plot = plot_of(kind, rows, whole if kind in LOSSES else groups, formulas=formulas)
        except NothingToPlotError as error:
            found.append(Picture(kind.replace("_", " ").capitalize(), why=str(error)))
        else:
            found.append(picture_of(plot, styles))
    return found


def timeline_of(folders: Mapping[str, Sequence[RunDir]], styles: Styles) -> Picture:
    """Draw the newest recorded step of the first run of each row."""
    steps, why = {}, "no run has recorded a timeline"
    for label, runs in list(folders.items())[:MOST_TIMELINES]:
        try:
            steps[label] = read_timeline(runs[0], None, None).slowest()
        except NotFoundError:  # most runs have no recorded step
            continue
        except MusterError as error:
            why = str(error)
    if not steps:
        return Picture("Timeline", why=why)
    return picture_of(timeline_plot(steps), styles)
