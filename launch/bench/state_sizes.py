"""`muster memory --parameters N`: model states of a rank at every ZeRO stage, from a number of parameters. Pure.

Parameters, gradients and optimizer states take P (p + g + K o) bytes (Rajbhandari et al. 2020). A stage divides one
more of them by the ranks. The formula is that of `collectives_bench/cost/memory.py`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.errors import UsageError
from muster.jobs.basics.words import counted

if TYPE_CHECKING:
    from muster.collectives_bench.cost.load import Recipe

NAMES: Final = ("baseline", "stage 1", "stage 2", "stage 3")
COUNTS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
MOST_PARAMETERS: Final = 10**18
MOST_STATES: Final = 64
MOST_BITS: Final = 64
MOST_RANKS: Final = 10**7
BITS: Final = 8  # of a byte
DECIMAL: Final = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
COLUMNS: Final = (
    "",
    "parameters>",
    "gradients>",
    "optimizer>",
    "a rank>",
    "(binary)>",
    "all ranks>",
    "(binary)>",
    "a rank's bytes",
)
LEGEND: Final = """\
parameters, gradients and optimizer states only; activations, buffers and communication come on top:
muster memory JOB.yaml predicts those. K counts every optimizer state, float32 master weights included:
0: plain SGD, 1: SGD with momentum, 2: Adam, 3: Adam and master weights beside 16-bit parameters"""
_COUNT = re.compile(r"(\d{1,20}(?:\.\d{1,20})?(?:e\+?\d{1,2})?)\s*([kmbgt]?)", re.IGNORECASE)


@dataclass(frozen=True)
class Asked:
    """What is asked for, as text of a command line where it is to be read."""

    parameters: str
    optimizer_states: str | None
    bits: str | None
    world: int | None


def sizes_of(asked: Asked) -> dict[str, Any]:
    """Return a record of every stage, in bytes.

    Raises:
        UsageError: if a number is missing or out of range.
    """
    from muster.collectives_bench.cost.load import Recipe
    from muster.collectives_bench.cost.memory import states

    elements, count = _parameters(asked.parameters), _states(asked.optimizer_states)
    bits, ranks = _bits(asked.bits), _ranks(asked.world)
    recipe = Recipe(bits[0], bits[1], count * bits[2])
    stages = []
    for stage, name in enumerate(NAMES):
        held = states(elements, recipe, zero=stage, ranks=ranks)
        stages.append(
            {
                "stage": stage,
                "name": name,
                "parameters": held.parameters / BITS,
                "gradients": held.gradients / BITS,
                "optimizer": held.optimizer / BITS,
                "per_rank": held.states / BITS,
                "all_ranks": held.states / BITS * ranks,
                "formula": _formula(stage, elements, recipe, ranks),
            }
        )
    return {
        "parameters": elements,
        "optimizer_states": count,
        "bits": dict(zip(("parameters", "gradients", "optimizer_states"), bits, strict=True)),
        "world": ranks,
        "stages": stages,
    }


def render(record: dict[str, Any]) -> str:
    """Lay the record out as a table, with the formula."""
    from muster.launch.common import screen

    bits = record["bits"]
    head = (
        f"P = {count_text(record['parameters'])} parameters, N = {counted(record['world'], 'rank')}, "
        f"K = {counted(record['optimizer_states'], 'optimizer state')}; bits: parameters p = {bits['parameters']:g}, "
        f"gradients g = {bits['gradients']:g}, an optimizer state o = {bits['optimizer_states']:g}"
    )
    rows = [
        [
            each["name"],
            *(size(each[kind], DECIMAL, 1000) for kind in ("parameters", "gradients", "optimizer")),
            *(text for key in ("per_rank", "all_ranks") for text in both(each[key])),
            each["formula"],
        ]
        for each in record["stages"]
    ]
    return "\n".join([head, "", screen.table(COLUMNS, rows), "", LEGEND])


def both(nbytes: float) -> tuple[str, str]:
    """Write a size in decimal and in binary units."""
    return size(nbytes, DECIMAL, 1000), size(nbytes, BINARY, 1024)


def size(nbytes: float, units: Sequence[str], step: int) -> str:
    """Write a size with four figures, in the largest unit of which there is one."""
    place = 0
    while nbytes >= step and place < len(units) - 1:
        nbytes, place = nbytes / step, place + 1
    return f"{nbytes:.4g} {units[place]}"


def _formula(stage: int, elements: int, recipe: "Recipe", ranks: int) -> str:
    """Write P (p + g + K o) in bytes, with the numbers filled in."""
    count = count_text(elements)
    terms = [f"{each / BITS:g}" for each in (recipe.parameter, recipe.gradient, recipe.optimizer)]
    whole, shared = terms[: 3 - stage], terms[3 - stage :]
    if not shared:
        return f"{count} x ({' + '.join(whole)})"
    divided = f"{' + '.join(shared)}" if len(shared) == 1 else f"({' + '.join(shared)})"
    divided += f" / {ranks}"
    return f"{count} x ({' + '.join([*whole, divided])})" if whole else f"{count} x {divided}"


def count_text(count: float) -> str:
    """Write a large number with an exponent of millions or billions: 10e9, 123.6e6, 4096."""
    for exponent in (9, 6):
        if count >= 10**exponent:
            return f"{count / 10**exponent:.6g}e{exponent}"
    return f"{count:.6g}"


def _parameters(text: str) -> int:
    match = _COUNT.fullmatch(text.strip())
    value = float(match[1]) * COUNTS[match[2].lower()] if match else 0.0
    if not 1 <= value <= MOST_PARAMETERS:
        raise UsageError(f"--parameters {text}: wanted a number from 1 to 1e18, such as 10e9, 10B or 1.3M")
    return round(value)


def _states(text: str | None) -> int:
    if text is None:
        raise UsageError(
            "--optimizer-states is missing: give 0 for plain SGD, 1 with momentum, 2 for Adam, 3 with masters"
        )
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and int(text) <= MOST_STATES):
        raise UsageError(
            f"--optimizer-states {text}: wanted a whole number from 0 to {MOST_STATES}, such as 2 for Adam"
        )
    return int(text)


def _bits(text: str | None) -> tuple[int, int, int]:
    words = ("32" if text is None else text).replace(" ", "").split(",")
    numbers = [int(word) for word in words if word.isascii() and word.isdigit() and len(word) <= 4]
    if len(numbers) != len(words) or len(words) not in (1, 3) or not all(1 <= each <= MOST_BITS for each in numbers):
        raise UsageError(
            f"--bits {text}: wanted a number from 1 to {MOST_BITS}, or three with commas, such as 16,16,32 for "
            "parameters, gradients and optimizer states"
        )
    first, second, third = numbers if len(numbers) == 3 else numbers * 3
    return first, second, third


def _ranks(world: int | None) -> int:
    if world is None:
        raise UsageError("--world is missing: give the number of ranks, such as --world 8")
    if not 1 <= world <= MOST_RANKS:
        raise UsageError(f"--world {world}: wanted a number of ranks from 1 to {MOST_RANKS}")
    return world
