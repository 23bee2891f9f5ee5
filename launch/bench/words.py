"""The command line of `muster bench`: operations, their settings, and the worlds to measure."""

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
from muster.launch.bench.choices import SectionOption, Switch, number, whole, word_list


def _sizes(text: str) -> list[int]:
    return sorted(set(parse_sizes(text)))


CHOICES: Final = (
    SectionOption(
        "--sizes",
        "sizes",
        _sizes,
        "SIZES",
        "such as 8, 36.9MB, 512K:1G or 512K:1G:4, or a named list: course, small, default",
    ),
    SectionOption("--dtype", "dtypes", word_list, "TYPE,TYPE", "fp32 (default), bf16, fp16, int32"),
    SectionOption(
        "--place",
        "places",
        str,
        "PLACE",
        "in: results overwrite their inputs; out: they do not; both (default: the operation's usual one)",
    ),
    SectionOption("--call", "calls", word_list, "CALL,CALL", "sync (default), async"),
    SectionOption("--backend", "backend", str, "NAME,NAME", "auto (default), gloo, nccl; several are compared"),
    SectionOption("--device", "device", str, "NAME", "auto (default), cpu, cuda"),
    SectionOption(
        "--launches",
        "launches",
        whole,
        "N",
        "fresh starts of all processes; compare treats each as one observation (default: 5)",
    ),
    SectionOption("--block-s", "block_s", number, "S", "seconds of samples per size and launch (default: 0.25)"),
    SectionOption("--timeout-s", "timeout_s", number, "S", "timeout of a call, in seconds (default: 30)"),
    SectionOption("--pair-size", "pair_bytes", parse_size, "SIZE", "message size for --pairs (default: 4M)"),
    SectionOption("--seed", "seed", whole, "N", "seed for the order of the cells (default: 0)"),
)
SWITCHES: Final = (
    Switch(
        "--wire",
        "wire",
        True,
        "also count the bytes sent by the network interfaces, and compare them with the formulas",
    ),
    Switch("--pairs", "pairs", True, "measure every pair of nodes instead, to find slow nodes and links"),
    Switch("--no-check", "check", False, "do not check the elements of results"),
)


def add_choices(parser: argparse.ArgumentParser) -> None:
    """Add the options that change settings, and the options that choose the worlds."""
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
            raise UsageError("hello: it measures nothing; start it with: muster run jobs/examples/hello.yaml")
        if name not in valid:
            raise UsageError(unknown("operation", name, valid))
    return names


def changes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `bench:` that options change. Errors as for `choices.changes`."""
    return choices.changes(given, BenchSettings, CHOICES, SWITCHES)


def settings(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the settings that options change, one mapping for each backend of `--backend`.

    Raises:
        UsageError: as for `choices.changes`, or if a backend is given twice.
    """
    if given["backend"] is None:
        return [changes(given)]
    names = word_list(given["backend"])
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--backend {given['backend']}: {twice} is given twice; give each once")
    return [changes({**given, "backend": name}) for name in names]


def worlds(nodes: str | None, ranks_per_node: str | None) -> list[tuple[int | None, int | str | None]]:
    """Return the nodes and ranks per node of each world, with ranks varying fastest; a missing option yields None.

    Raises:
        UsageError: if a number is invalid or repeated.
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
            raise UsageError(f"{flag} {text}: must be {wanted}, or several separated by commas, got {word!r}")
        if value in found:
            raise UsageError(f"{flag} {text}: {word} is given twice; give each once")
        found.append(value)
    return found


def job_text(names: list[str], settings: dict[str, Any], nodes: int, ranks_per_node: int | str) -> str:
    """Return the text of a job file that measures the operations."""
    words = ["bench", *(["pairs"] if settings.get("pairs") else names)]
    return choices.job_text(words, nodes=nodes, ranks_per_node=ranks_per_node, bench={"operation": names, **settings})


def overrides(settings: dict[str, Any]) -> list[str]:
    """Convert settings to `--set` overrides of a job file."""
    return [f"bench.{name}={yamlfile.flow(value).removesuffix('...').strip()}" for name, value in settings.items()]
