"""What the command line says of a measurement: which operations, with which settings, in which worlds."""

import argparse
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from collectives_bench.catalog import OPERATIONS
from collectives_bench.settings import ALL, HELLO, OURS, BenchSettings
from collectives_bench.sizes import parse_size, parse_sizes
from jobs import mistakes, yamlfile
from jobs.errors import UsageError
from jobs.spec import unknown
from jobs.yamlfile import Document, Place

LONGEST_NAME: Final = 64
PLOTS: Final = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Choice:
    """An option that stands for a setting of `bench:`."""

    flag: str
    field: str
    read: Callable[[str], Any]
    metavar: str
    help: str

    @property
    def name(self) -> str:
        """The attribute that argparse gives it."""
        return self.flag.removeprefix("--").replace("-", "_")


def _sizes(text: str) -> list[int]:
    return sorted({size for word in text.split(",") for size in parse_sizes(word.strip())})


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"must be a whole number, got {text!r}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"must be a number, got {text!r}") from None


CHOICES: Final = (
    Choice("--sizes", "sizes", _sizes, "SIZES", "8, 36.9MB, 512K:1G, 512K:1G:4, or a list: course, small, default"),
    Choice("--dtype", "dtypes", _words, "TYPE,TYPE", "fp32 (default), bf16, fp16, int32"),
    Choice("--place", "places", str, "PLACE", "in: results over their inputs; out; both (default: what is usual)"),
    Choice("--call", "calls", _words, "CALL,CALL", "sync (default), async"),
    Choice("--backend", "backend", str, "NAME", "auto (default), gloo, nccl"),
    Choice("--device", "device", str, "NAME", "auto (default), cpu, cuda"),
    Choice("--launches", "launches", _whole, "N", "fresh starts of all processes: the unit of comparison (default: 5)"),
    Choice("--block-s", "block_s", _number, "S", "seconds for the samples of one size in a launch (default: 0.25)"),
    Choice("--timeout-s", "timeout_s", _number, "S", "a call that takes longer is given up (default: 30)"),
    Choice("--pair-size", "pair_bytes", parse_size, "SIZE", "of --pairs: the message (default: 4M)"),
    Choice("--seed", "seed", _whole, "N", "of the order of the cells (default: 0)"),
)
SWITCHES: Final = (
    ("--wire", "wire", True, "also count the bytes that the network interfaces send, against the formulas"),
    ("--pairs", "pairs", True, "measure every pair of nodes instead, and name slow nodes and links"),
    ("--no-check", "check", False, "do not compare every element of every result"),
)


def add_choices(parser: argparse.ArgumentParser) -> None:
    """Add the options that stand for settings, and the worlds to measure in."""
    group = parser.add_argument_group("what is measured")
    for choice in CHOICES:
        group.add_argument(choice.flag, metavar=choice.metavar, help=choice.help)
    for flag, field, value, text in SWITCHES:
        group.add_argument(flag, dest=field, action="store_const", const=value, help=text)
    worlds = parser.add_argument_group("worlds (one run each)")
    worlds.add_argument("-N", "--nodes", metavar="N,N", help="numbers of nodes, such as 1,2,4")
    worlds.add_argument("-n", "--ranks-per-node", metavar="M,M", help="of ranks on each, such as 1,2,3, or slots")


def is_file(word: str) -> bool:
    """Say whether a word names a job file rather than operations."""
    return word.endswith((".yaml", ".yml")) or "/" in word or Path(word).is_file()


def operations(word: str) -> list[str]:
    """Return the operations of a list.

    Raises:
        UsageError: one is unknown, or measures nothing.
    """
    names = list(dict.fromkeys(_words(word)))
    valid = (ALL, OURS, *OPERATIONS)
    for name in names:
        if not name:
            raise UsageError(f"{word}: a name is empty; write operations with one comma between two")
        if name == HELLO:
            raise UsageError("hello: measures nothing; muster run jobs/examples/hello.yaml starts it")
        if name not in valid:
            raise UsageError(unknown("operation", name, valid))
    return names


def changes(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that options change, checked one by one and against one another.

    Raises:
        UsageError: some are wrong; all of them at once.
    """
    found: dict[str, Any] = {}
    wrong: list[str] = []
    for choice in CHOICES:
        text = getattr(args, choice.name)
        if text is None:
            continue
        try:
            found[choice.field] = choice.read(text)
        except ValueError as error:
            wrong.append(f"{choice.flag}: {error}")
    for _, field, _, _ in SWITCHES:
        if getattr(args, field) is not None:
            found[field] = getattr(args, field)
    document = Document("the options", found, {(choice.field,): Place(choice.flag) for choice in CHOICES})
    mistakes.check(BenchSettings, found, document)
    wrong += [f"{mistake.place if mistake.path else 'options'}: {mistake.text}" for mistake in document.mistakes]
    if wrong:
        raise UsageError("\n".join(wrong))
    return found


def worlds(args: argparse.Namespace) -> list[tuple[int | None, int | str | None]]:
    """Return the nodes and ranks per node of each world, the latter running fastest; None where nobody says.

    Raises:
        UsageError: one is no such number, or is given twice.
    """
    nodes = _counts("--nodes", args.nodes)
    ranks = _counts("--ranks-per-node", args.ranks_per_node, "slots")
    return list(itertools.product(nodes, ranks))  # type: ignore[arg-type]


def _counts(flag: str, text: str | None, *also: str) -> list[int | str | None]:
    if text is None:
        return [None]
    found: list[int | str | None] = []
    for word in _words(text):
        value: int | str = word if word in also else int(word) if word.isdecimal() else 0
        if value == 0:
            wanted = " or ".join(("a whole number from 1", *also))
            raise UsageError(f"{flag} {text}: must be {wanted}, with commas between several, got {word!r}")
        if value in found:
            raise UsageError(f"{flag} {text}: {word} is given twice; give each once")
        found.append(value)
    return found


def job_text(names: list[str], settings: dict[str, Any], nodes: int, ranks_per_node: int | str) -> str:
    """Return the job file that a command line without one stands for."""
    name = "-".join(["bench", *(["pairs"] if settings.get("pairs") else names)])[:LONGEST_NAME].rstrip("-._")
    around = {"name": name, "nodes": nodes, "ranks_per_node": ranks_per_node}
    return yamlfile.dump({**around, "bench": {"operation": names, **settings}})


def overrides(settings: dict[str, Any]) -> list[str]:
    """Spell settings as `--set` does, to be laid over a job file's."""
    return [f"bench.{name}={yamlfile.flow(value).removesuffix('...').strip()}" for name, value in settings.items()]


def check_output(flag: str, given: str | None, suffixes: tuple[str, ...]) -> None:
    """Refuse a file that could not be written in the end, before anything is measured.

    Raises:
        UsageError: its folder is missing, or its suffix is another.
    """
    if given is None:
        return
    path = Path(given)
    if path.suffix not in suffixes:
        raise UsageError(f"{flag} {given}: must end in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise UsageError(f"{flag} {given}: no such folder: {path.parent}; make it, or choose another")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        found = "is a folder" if path.is_dir() else f"you may not write into {path.parent.absolute()}"
        raise UsageError(f"{flag} {given}: {found}; choose another file")
