"""A report as a self-contained HTML file. Jinja2 escapes all texts. Its content policy allows only its own script."""

import base64
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.terminal import printable
from muster.jobs.trace.flame import HUES
from muster.launch.look.comparison import RunRow
from muster.launch.look.plots.draw import page_css
from muster.launch.look.report.pictures import Picture, Styles
from muster.launch.look.report.runs import RunView
from muster.launch.look.report.tables import Table

FOLDER: Final = Path(__file__).parent
MARK: Final = "muster report"  # identifies a file as a report


@dataclass(frozen=True)
class ReportPage:
    """The content of a report."""

    title: str
    lead: str
    made: str
    version: str
    command: str
    rows: Sequence[RunRow]
    comparison: Table | None
    notes: Sequence[str]
    pictures: Sequence[Picture]
    runs: Sequence[RunView]
    records: Sequence[dict[str, Any]]
    predicted: Table | None = None  # parts of the steps beside their prediction


def render(report: ReportPage, styles: Styles) -> str:
    """Return the HTML of the page.

    Raises:
        RefusedError: if Jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup
    except ModuleNotFoundError as error:
        need = f"a report needs {error.name}, which {sys.executable} does not have"
        raise RefusedError(f"{need}; install the extra `plots`: ./setup.sh, or pip install '.[plots]'") from error

    def plain(value: Any) -> Any:
        """Escape characters that reorder or hide text, as on a terminal, but keep newlines."""
        if isinstance(value, str) and not isinstance(value, Markup):
            return "\n".join(map(printable, value.split("\n")))
        return value

    loader = FileSystemLoader(FOLDER)
    pages = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=plain
    )
    pages.filters["drawn"] = Markup  # marks generated HTML as safe: pictures, style sheet and script
    hues = "".join(f".k-{kind}{{--hue:{hue}}}" for kind, hue in HUES.items())
    style = (
        (FOLDER / "style.css").read_text(encoding="utf-8")
        + page_css().replace("@media(", "@media screen and (")
        + hues
        + styles.css()
    )
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'; "
    policy += "form-action 'none'"
    return pages.get_template("page.html.j2").render(
        report=report, mark=MARK, policy=policy, style=style, script=script
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
