"""The site file: what belongs to a cluster and not to a job. Every key is optional, and so is the file."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import Field, field_validator

from jobs import mistakes, yamlfile
from jobs.errors import JobFileError
from jobs.spec import Passable, Strict, Variable

SITE_VARIABLE: Final = "MUSTER_SITE"
PATHS: Final = ("interpreter", "runs", "data")


class Site(Strict):
    """The settings of one cluster: where Python, runs and data sets are, and what every job there needs."""

    interpreter: str | None = None
    runs: str | None = None
    data: str | None = None
    env: dict[Variable, Passable] = Field(default_factory=dict)
    setup: list[str] = Field(default_factory=list)

    @field_validator("interpreter")
    @classmethod
    def _is_absolute(cls, path: str | None) -> str | None:
        if path is not None and not path.startswith("/"):
            raise ValueError(f"must be an absolute path, got {path!r}; for example /usr/bin/python3")
        return path


@dataclass(frozen=True)
class SitePath:
    """Where the site file is looked for, and who said so; only the user's own folder may lack one."""

    path: Path
    origin: str
    required: bool


def site_path(given: str | None, environ: Mapping[str, str] = os.environ) -> SitePath:
    """Choose the site file: the given one, else MUSTER_SITE, else the one of the user's configuration folder."""
    if given:
        return SitePath(Path(given), "--site", required=True)
    if named := environ.get(SITE_VARIABLE):
        return SitePath(Path(named), SITE_VARIABLE, required=True)
    # The XDG base directory specification: a relative XDG_CONFIG_HOME is to be ignored.
    folder = Path(environ.get("XDG_CONFIG_HOME", ""))
    if not folder.is_absolute():
        folder = Path(environ.get("HOME") or Path.home()) / ".config"
    return SitePath(folder / "muster" / "site.yaml", "default", required=False)


def load_site(given: str | None, environ: Mapping[str, str] = os.environ) -> Site:
    """Load the site file that `site_path` chooses, or the defaults where there is none.

    Relative `runs` and `data` are taken from the site file's own folder; `~` is the home folder.

    Raises:
        JobFileError: a file that was asked for is missing, or the file is wrong; one line per mistake.
    """
    chosen = site_path(given, environ)
    try:
        document = yamlfile.read(chosen.path)
    except FileNotFoundError as error:
        if not chosen.required:
            return Site()
        raise JobFileError(f"{chosen.path}: no such file; {chosen.origin} names it as the site file") from error
    if document.value is None and not document.mistakes:
        return Site()  # a file of comments alone
    site = mistakes.check(Site, _absolute(document.mapping(), chosen.path.parent.absolute()), document)
    document.raise_mistakes()
    assert site is not None, "a site that could not be built left no mistake"
    return site


def _absolute(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Expand paths; a relative interpreter stays, to be refused."""
    for key in PATHS:
        value = raw.get(key)
        if isinstance(value, str) and value:
            path = Path(value).expanduser()
            raw[key] = str(path if key == "interpreter" else folder / path)
    return raw
