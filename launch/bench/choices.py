"""Command-line options that set fields of a job's section: tables of options, and functions that add and read them."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from muster.jobs.basics.errors import UsageError
from muster.jobs.spec import mistakes, yamlfile
from muster.jobs.spec.yamlfile import Document, KeyPath, KeyPlace
from muster.launch.common.options import add_json, add_overrides, add_runs, add_site_and_name, add_transport

LONGEST_NAME: Final = 64
PLOTS: Final = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class SectionOption:
    """An option that sets one field of a section."""

    flag: str
    field: str
    read: Callable[[str], Any]
    metavar: str
    help: str

    @property
    def name(self) -> str:
        """The option's attribute in argparse's namespace."""
        return self.flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class Switch:
    """An option without a value; it sets a field to a fixed value."""

    flag: str
    field: str
    value: Any
    help: str


def word_list(text: str) -> list[str]:
    """Split a comma-separated list of words."""
    return [word.strip() for word in text.split(",")]


def whole(text: str) -> int:
    """Read a whole number, or raise ValueError."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"must be a whole number, got {text!r}") from None


def number(text: str) -> float:
    """Read a number, or raise ValueError."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"must be a number, got {text!r}") from None


def add(group: argparse._ActionsContainer, choices: Sequence[SectionOption], switches: Sequence[Switch]) -> None:
    """Add options to a parser, or to one of its groups."""
    for choice in choices:
        group.add_argument(choice.flag, metavar=choice.metavar, help=choice.help)
    for switch in switches:
        group.add_argument(switch.flag, dest=switch.field, action="store_const", const=switch.value, help=switch.help)


@dataclass(frozen=True)
class Output:
    """The destinations of a result; one field per option."""

    out: str | None = None
    plot: str | None = None
    json: bool = False

    def check(self) -> None:
        """Check that the files can be written. Errors as for `check_output`."""
        check_output("--out", self.out, (".json",))
        check_output("--plot", self.plot, PLOTS)


def add_measuring(parser: argparse.ArgumentParser, *, plot: str) -> None:
    """Add the options for a measurement's results, and those of `muster run`. `plot` describes the plot."""
    results = parser.add_argument_group("results")
    results.add_argument(
        "--out", metavar="FILE.json", help="write all records to this file, and the rows to a .csv file beside it"
    )
    results.add_argument("--plot", metavar="FILE", help=f"draw {plot}: .png, .svg or .pdf")
    add_json(parser)
    add_overrides(parser)
    add_site_and_name(parser)
    add_runs(parser)
    add_transport(parser)


def changes(
    given: Mapping[str, Any],
    model: type[BaseModel],
    choices: Sequence[SectionOption],
    switches: Sequence[Switch],
) -> dict[str, Any]:
    """Return the settings that the options in `given` change, checked individually and in combination.

    Raises:
        UsageError: if an option is invalid. The message lists all invalid options.
    """
    found: dict[str, Any] = {}
    unread: set[str] = set()
    wrong: list[str] = []
    for choice in choices:
        text = given[choice.name]
        if text is None:
            continue
        try:
            found[choice.field] = choice.read(text)
        except ValueError as error:
            wrong.append(f"{choice.flag}: {error}")
            unread.add(choice.field)
    for switch in switches:
        if given[switch.field] is not None:
            found[switch.field] = given[switch.field]
    flags = {switch.field: switch.flag for switch in switches} | {choice.field: choice.flag for choice in choices}
    places: dict[KeyPath, KeyPlace] = {(field,): KeyPlace(flag) for field, flag in flags.items()}
    document = Document("the options", found, places)
    mistakes.check(model, found, document)
    mistaken = [mistake for mistake in document.mistakes if not unread.intersection(mistake.path)]
    wrong += [f"{mistake.place if mistake.path else 'options'}: {mistake.text}" for mistake in mistaken]
    if wrong:
        raise UsageError("\n".join(wrong))
    return found


def job_text(words: Sequence[str], **sections: Any) -> str:
    """Return the text of a job file built from the command line; `words` form the job's name."""
    return yamlfile.dump({"name": "-".join(words)[:LONGEST_NAME].rstrip("-._"), **sections})


def check_output(flag: str, given: str | None, suffixes: tuple[str, ...]) -> None:
    """Check before a measurement that its output file can be written.

    Raises:
        UsageError: if its folder is missing or not writable, or its suffix is not one of `suffixes`.
    """
    if given is None:
        return
    path = Path(given)
    if path.suffix not in suffixes:
        raise UsageError(f"{flag} {given}: must end in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise UsageError(f"{flag} {given}: no such folder: {path.parent}; create it, or choose another")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        found = "is a folder" if path.is_dir() else f"you may not write into {path.parent.absolute()}"
        raise UsageError(f"{flag} {given}: {found}; choose another file")
