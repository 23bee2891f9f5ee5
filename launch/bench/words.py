"""The command line of a measurement: the operations, their settings, and the worlds."""

import argparse
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from muster.collectives_bench.catalog import OPERATIONS
from muster.collectives_bench.settings import ALL, HELLO, OURS, BenchSettings
from muster.collectives_bench.sizes import parse_size, parse_sizes
from muster.jobs.basics.errors import UsageError
from muster.jobs.basics.words import unknown
from muster.jobs.spec import yamlfile
from muster.launch.bench import choices
from muster.launch.bench.choices import Choice, Switch, number, whole, word_list


def _sizes(text: str) -> list[int]:
    return sorted(set(parse_sizes(text)))


CHOICES: Final = (
    Choice("--sizes", "sizes", _sizes, "SIZES", "8, 36.9MB, 512K:1G, 512K:1G:4, or a list: course, small, default"),
    Choice("--dtype", "dtypes", word_list, "TYPE,TYPE", "fp32 (default), bf16, fp16, int32"),
    Choice("--place", "places", str, "PLACE", "in: results replace their inputs; out; both (default: the usual one)"),
    Choice("--call", "calls", word_list, "CALL,CALL", "sync (default), async"),
    Choice("--backend", "backend", str, "NAME", "auto (default), gloo, nccl"),
    Choice("--device", "device", str, "NAME", "auto (default), cpu, cuda"),
    Choice("--launches", "launches", whole, "N", "fresh starts of all processes: the unit of comparison (default: 5)"),
    Choice("--block-s", "block_s", number, "S", "seconds for the samples of one size in a launch (default: 0.25)"),
    Choice("--timeout-s", "timeout_s", number, "S", "a call that takes longer is abandoned (default: 30)"),
    Choice("--pair-size", "pair_bytes", parse_size, "SIZE", "size of the messages of --pairs (default: 4M)"),
    Choice("--seed", "seed", whole, "N", "seed for the order of the cells (default: 0)"),
)
SWITCHES: Final = (
    Switch(
        "--wire", "wire", True, "also count the bytes sent by the network interfaces, and compare with the formulas"
    ),
    Switch("--pairs", "pairs", True, "measure every pair of nodes instead, and name slow nodes and links"),
    Switch("--no-check", "check", False, "do not compare every element of every result"),
)


def add_choices(parser: argparse.ArgumentParser) -> None:
    """Add the options that stand for settings, and those that name the worlds."""
    group = parser.add_argument_group("what is measured")
    choices.add(group, CHOICES, SWITCHES)
    worlds = parser.add_argument_group("worlds (one run each)")
    worlds.add_argument("-N", "--nodes", metavar="N,N", help="numbers of nodes, such as 1,2,4")
    worlds.add_argument(
        "-n", "--ranks-per-node", metavar="M,M", help="numbers of ranks per node, such as 1,2,3, or slots"
    )


def is_file(word: str) -> bool:
    """Return whether a word names a job file rather than operations."""
    return word.endswith((".yaml", ".yml")) or "/" in word or Path(word).is_file()


def operations(word: str) -> list[str]:
    """Return the operations in a comma-separated list.

    Raises:
        UsageError: if one is unknown, or measures nothing.
    """
    names = list(dict.fromkeys(word_list(word)))
    valid = (ALL, OURS, *OPERATIONS)
    for name in names:
        if not name:
            raise UsageError(f"{word}: a name is empty; separate operations by single commas")
        if name == HELLO:
            raise UsageError("hello: measures nothing; muster run jobs/examples/hello.yaml starts it")
        if name not in valid:
            raise UsageError(unknown("operation", name, valid))
    return names


def changes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `bench:` that options change. Errors as for `choices.changes`."""
    return choices.changes(given, BenchSettings, CHOICES, SWITCHES)


def worlds(nodes: str | None, ranks_per_node: str | None) -> list[tuple[int | None, int | str | None]]:
    """Return the nodes and ranks per node of each world, with ranks varying fastest; None if not given.

    Raises:
        UsageError: if a number is invalid or given twice.
    """
    ranks = _counts("--ranks-per-node", ranks_per_node, "slots")
    return list(itertools.product(_counts("--nodes", nodes), ranks))  # type: ignore[arg-type]


def _counts(flag: str, text: str | None, *also: str) -> list[int | str | None]:
    if text is None:
        return [None]
    found: list[int | str | None] = []
    for word in word_list(text):
        value: int | str = word if word in also else int(word) if word.isdecimal() else 0
        if value == 0:
            wanted = " or ".join(("a whole number from 1", *also))
            raise UsageError(f"{flag} {text}: must be {wanted}, with commas between several, got {word!r}")
        if value in found:
            raise UsageError(f"{flag} {text}: {word} is given twice; give each once")
        found.append(value)
    return found


def job_text(names: list[str], settings: dict[str, Any], nodes: int, ranks_per_node: int | str) -> str:
    """Return the text of the job file for a command line without one."""
    words = ["bench", *(["pairs"] if settings.get("pairs") else names)]
    return choices.job_text(words, nodes=nodes, ranks_per_node=ranks_per_node, bench={"operation": names, **settings})


def overrides(settings: dict[str, Any]) -> list[str]:
    """Convert settings to the form of `--set`, to override those of a job file."""
    return [f"bench.{name}={yamlfile.flow(value).removesuffix('...').strip()}" for name, value in settings.items()]
