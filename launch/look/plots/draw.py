"""Drawing of a `Plot` with matplotlib, into a file or as SVG for an HTML page."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.terminal import printable
from muster.jobs.measuring.figures import NothingToPlotError, drawing, sheet
from muster.launch.look.plots.lanes import paint_lanes
from muster.launch.look.plots.panels import COLORS, GRID, PAINTERS, beside, places_of, shortened
from muster.launch.look.plots.series import Plot

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from matplotlib.figure import Figure

WIDTH: Final = 7.0  # inches
LETTER: Final = 0.075  # width of a letter of font size 9, in inches
LINE: Final = 0.2  # height of a line of text, in inches
NARROW: Final = 58  # number of letters per line that fit below the axes if names are as long as possible
BAR: Final = 0.3
MOST_BARS: Final = 250
MOST_LINES: Final = 60
SVG: Final = "http://www.w3.org/2000/svg"
XLINK: Final = "{http://www.w3.org/1999/xlink}href"
DARK: Final = ("#3f8fbf", "#2f6fb5", "#b87a00", "#16855f", "#5a5a5a", "#a8618a", "#c25a1f", "#808080")


def save(plot: Plot, path: Path, command: str) -> None:
    """Draw a plot into a .png, .svg or .pdf file, with the command line in its metadata.

    Raises:
        NothingToPlotError: if the plot has more rows than a picture can show.
        RefusedError, RunFolderError, StorageError: as for `drawing`.
    """
    with drawing(path, *size_of(plot), command=command) as figure:
        draw(plot, figure)


def draw(plot: Plot, figure: "Figure") -> None:
    """Draw the panels of a plot, with one legend for all."""
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):  # treat `$` and `_` in names as plain characters
        every = figure.subplots(len(plot.panels), 1, squeeze=False)[:, 0]
        handles: dict[str, Any] = {}
        for axes, panel in zip(every, plot.panels, strict=True):
            paint = paint_lanes if panel.style == "lanes" else PAINTERS[panel.style]
            handles |= paint(axes, panel)
            axes.set_title(panel.title, loc="left", fontweight="bold")
            axes.set_axisbelow(True)
        if plot.note:
            every[-1].set_xlabel(f"{every[-1].get_xlabel()}\n{_wrapped(plot.note)}")
        if len(handles) > 1:
            _legend(figure, handles)


def inline_svg(plot: Plot) -> str:
    """Draw a plot as an <svg> element for an HTML page. Its colors are CSS variables defined by `page_css`.

    Raises:
        NothingToPlotError: if the plot has more rows than a picture can show.
        RefusedError: if matplotlib is not installed.
    """
    import hashlib
    import io
    from xml.etree import ElementTree

    drawn = io.StringIO()
    with sheet(*size_of(plot), {"svg.fonttype": "none"}) as figure:
        draw(plot, figure)
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    ElementTree.register_namespace("", SVG)
    root = ElementTree.fromstring(drawn.getvalue())
    prefix = f"plot-{plot.kind}-{hashlib.sha256(repr(plot).encode()).hexdigest()[:8]}"
    _fit_into_page(root, prefix)
    about_it = f"{plot.y_label}: {', '.join(dict.fromkeys(each.label for each in plot.series))}. {plot.note}"
    for place, (tag, text) in enumerate((("title", plot.title), ("desc", about_it))):
        about = ElementTree.Element(f"{{{SVG}}}{tag}", {"id": f"{prefix}-{tag}"})
        about.text = printable(text)
        root.insert(place, about)
    return ElementTree.tostring(root, encoding="unicode")


def page_css() -> str:
    """Return CSS that defines the colors of `inline_svg`, for light and dark pages."""
    light, dark = (
        "".join(f"--plot-{place}:{color};" for place, color in enumerate(colors, 1)) for colors in (COLORS, DARK)
    )
    return f":root{{{light}--plot-grid:#d0d0d0}}@media(prefers-color-scheme:dark){{:root{{{dark}--plot-grid:#444444}}}}"


def _fit_into_page(root: "Element", prefix: str) -> None:
    """Remove metadata and styles, make ids unique within the page, and leave size and colors to the page."""
    import re

    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
    variables = {color: f"var(--plot-{place}, {color})" for place, color in enumerate(COLORS, 1)}
    variables |= {GRID: f"var(--plot-grid, {GRID})"}
    for each in root.iter():
        for name, value in list(each.attrib.items()):
            if name == "id":
                each.set("id", f"{prefix}-{value}")
            elif name == XLINK:
                del each.attrib[name]
                each.set("href", value.replace("#", f"#{prefix}-"))
            else:
                value = re.sub(r"#[0-9a-f]{6}", lambda found: variables.get(found[0], "currentColor"), value)
                each.set(name, value.replace("url(#", f"url(#{prefix}-"))
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"role": "img", "aria-labelledby": f"{prefix}-title {prefix}-desc"}
    root.attrib |= {"fill": "currentColor", "stroke-linejoin": "round", "stroke-linecap": "butt", "class": "plot"}


def size_of(plot: Plot) -> tuple[float, float]:
    """Return the width and the height of a plot in inches.

    Raises:
        NothingToPlotError: if the plot has more rows than a picture can show.
    """
    height = 0.0
    for panel in plot.panels:
        lines = panel.style == "lines"
        many = len(panel.series) if lines else len(panel.lanes) or len(places_of(panel)) * beside(panel)
        if many > (MOST_LINES if lines else MOST_BARS):
            raise NothingToPlotError(
                f"{many} {'lines' if lines else 'bars'} are too many for a picture; name fewer runs"
            )
        height += 2.9 if lines else 0.9 + BAR * (many + 1)
    names = {each.label for panel in plot.panels for each in panel.series}
    notes = _wrapped(plot.note).count("\n") + 1 if plot.note else 0
    return WIDTH, height + LINE * (notes + -(-len(names) // _columns(list(names))) + 1)


def _legend(figure: "Figure", handles: dict[str, Any]) -> None:
    """Add a legend below the plot. Names are set afterwards, because matplotlib omits names that begin with `_`."""
    names = ["." for _ in handles]
    legend = figure.legend(
        list(handles.values()), names, loc="outside lower left", ncols=_columns(list(handles)), frameon=False
    )
    for text, name in zip(legend.get_texts(), handles, strict=True):
        text.set_text(shortened(name))


def _columns(names: Sequence[str]) -> int:
    widest = max((len(shortened(name)) for name in names), default=1)
    return max(min(int(WIDTH / (LETTER * widest + 0.6)), len(names)), 1)


def _wrapped(text: str) -> str:
    import textwrap

    return textwrap.fill(shortened(text, 400), NARROW)
