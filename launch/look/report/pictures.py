"""The pictures of a page: each drawn as SVG, with its numbers as tables, or one line that says why there is none."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from xml.etree import ElementTree

from muster.jobs.basics.errors import MusterError
from muster.jobs.measuring.figures import NothingToPlotError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.look.comparison import Row
from muster.launch.look.plots.draw import inline_svg
from muster.launch.look.plots.lanes import timeline_plot
from muster.launch.look.plots.series import Groups, Plot, plot_of
from muster.launch.look.report.tables import Table, numbers_of
from muster.launch.look.timelines import read_timeline

KINDS: Final = ("split_time", "throughput", "scaling", "loss", "memory")
MOST_TIMELINES: Final = 4  # above each other
LONG: Final = re.compile(r"-?\d+\.\d\d+")
SVG: Final = "http://www.w3.org/2000/svg"


@dataclass
class Styles:
    """The `style` attributes of all pictures as classes of the page: its policy forbids such attributes."""

    names: dict[str, str] = field(default_factory=dict)

    def moved(self, svg: str) -> str:
        """Replace the `style` attributes of a picture by classes."""
        root = ElementTree.fromstring(svg)
        for each in root.iter():
            if path := each.get("d"):  # hatches have long ones
                each.set("d", LONG.sub(lambda found: f"{float(found[0]):.1f}", " ".join(path.split())))
            if style := each.attrib.pop("style", None):
                name = self.names.setdefault(style, f"s{len(self.names)}")
                each.set("class", " ".join(filter(None, (each.get("class"), name))))
        ElementTree.register_namespace("", SVG)
        return ElementTree.tostring(root, encoding="unicode")

    def css(self) -> str:
        """Return the rules of these classes."""
        return "".join(f".{name}{{{style}}}" for style, name in self.names.items())


@dataclass(frozen=True)
class Picture:
    """One picture of a page; `why` there is none."""

    title: str
    svg: str = ""
    tables: tuple[Table, ...] = ()
    why: str = ""
    plot: Plot | None = None

    def to_json(self) -> dict[str, Any]:
        """Return its plot as JSON has it."""
        return self.plot.to_json() if self.plot else {"title": self.title, "why": self.why}


def picture_of(plot: Plot, styles: Styles) -> Picture:
    """Draw a plot."""
    try:
        svg = styles.moved(inline_svg(plot))
    except NothingToPlotError as error:
        return Picture(plot.title, tables=tuple(numbers_of(plot)), why=str(error), plot=plot)
    return Picture(plot.title, svg, tuple(numbers_of(plot)), plot=plot)


def pictures(
    rows: Sequence[Row], groups: Groups, whole: Groups, formulas: Mapping[str, float], styles: Styles
) -> list[Picture]:
    """Draw every plot of the rows; losses are those of `whole`, with the warm-up."""
    found = []
    for kind in KINDS if rows else ():
        try:
            plot = plot_of(kind, rows, whole if kind == "loss" else groups, formulas=formulas)
        except NothingToPlotError as error:
            found.append(Picture(kind.replace("_", " ").capitalize(), why=str(error)))
        else:
            found.append(picture_of(plot, styles))
    return found


def timeline_of(folders: Mapping[str, Sequence[RunDir]], styles: Styles) -> Picture:
    """Draw the newest recorded step of the first run of each row."""
    steps = {}
    for label, runs in list(folders.items())[:MOST_TIMELINES]:
        with suppress(MusterError):  # most runs record none
            steps[label] = read_timeline(runs[0], None, None).slowest()
    if not steps:
        return Picture("Timeline", why="no run has recorded one")
    return picture_of(timeline_plot(steps), styles)
