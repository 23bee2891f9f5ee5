"""`muster memory --parameters P`: the size of a rank's model states at each ZeRO stage. Pure.

Parameters, gradients and optimizer states take P (p + g + K o) bytes (Rajbhandari et al. 2020). Each stage divides one
more of the three by the number of ranks. `collectives_bench/cost/memory.py` has the formula.
"""

import re
from dataclasses import dataclass
from typing import Any, Final

from muster.jobs.basics.errors import UsageError
from muster.jobs.basics.words import counted

NAMES: Final = ("baseline", "stage 1", "stage 2", "stage 3")
KINDS: Final = ("parameters", "gradients", "optimizer", "per_rank", "all_ranks")
COUNTS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
BITS: Final = 8  # per byte
DECIMAL: Final = (1000, ("B", "kB", "MB", "GB", "TB", "PB", "EB"))
BINARY: Final = (1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))
COLUMNS: Final = ("", *(f"{kind}>" for kind in KINDS[:3]), "a rank>", "or>", "all ranks>", "or>", "bytes of a rank")
LEGEND: Final = """\
Sizes of parameters, gradients and optimizer states only. Activations, buffers and communication are extra:
muster memory JOB.yaml predicts them. K counts every optimizer state, including float32 master weights:
0: plain SGD, 1: SGD with momentum, 2: Adam, 3: Adam with master weights for 16-bit parameters"""
_COUNT = re.compile(r"(\d{1,20}(?:\.\d{1,20})?(?:e\+?\d{1,2})?)\s*([kmbgt]?)", re.IGNORECASE)


@dataclass(frozen=True)
class StateSizesRequest:
    """The options that describe a model by its number of parameters."""

    parameters: str
    optimizer_states: int | None
    bits: str | None
    world: int | None


def sizes_of(asked: StateSizesRequest) -> dict[str, Any]:
    """Return the sizes at each ZeRO stage as plain values, in bytes.

    Raises:
        UsageError: if a number is missing or out of range.
    """
    from muster.collectives_bench.cost.load import Recipe
    from muster.collectives_bench.cost.memory import states

    elements, bits = _parameters(asked.parameters), _bits(asked.bits or "32")
    count = _within("--optimizer-states", asked.optimizer_states, 0, 64, "2 for Adam")
    ranks = _within("--world", asked.world, 1, 10**7, "8, the ranks")
    stages: list[dict[str, Any]] = []
    for stage, name in enumerate(NAMES):
        held = states(elements, Recipe(bits[0], bits[1], count * bits[2]), zero=stage, ranks=ranks)
        sizes = (held.parameters, held.gradients, held.optimizer, held.states, held.states * ranks)
        record = {kind: size / BITS for kind, size in zip(KINDS, sizes, strict=True)}
        formula = _formula(stage, elements, [bits[0], bits[1], count * bits[2]], ranks)
        stages.append({"stage": stage, "name": name, **record, "formula": formula})
    named = dict(zip(("parameters", "gradients", "optimizer_states"), bits, strict=True))
    return {"parameters": elements, "optimizer_states": count, "bits": named, "world": ranks, "stages": stages}


def render(record: dict[str, Any]) -> str:
    """Format the record as a table, with the formula."""
    from muster.launch.common import screen

    p, g, o = record["bits"].values()
    head = (
        f"P = {count_text(record['parameters'])} parameters, N = {counted(record['world'], 'rank')}, "
        f"K = {counted(record['optimizer_states'], 'optimizer state')}; bits: parameters p = {p}, gradients g = {g}, "
        f"an optimizer state o = {o}"
    )
    rows = [
        [
            each["name"],
            *(size_in(DECIMAL, each[kind]) for kind in KINDS[:3]),
            *(size_in(units, each[kind]) for kind in KINDS[3:] for units in (DECIMAL, BINARY)),
            each["formula"],
        ]
        for each in record["stages"]
    ]
    return "\n".join([head, "", screen.table(COLUMNS, rows), "", LEGEND])


def size_in(units: tuple[int, tuple[str, ...]], nbytes: float) -> str:
    """Format a size with four digits, in the largest unit in which it is at least 1."""
    step, names = units
    place = 0
    while nbytes >= step and place < len(names) - 1:
        nbytes, place = nbytes / step, place + 1
    return f"{nbytes:.4g} {names[place]}"


def count_text(count: float) -> str:
    """Format a count, with an exponent from a million on, such as 10e9, 123.6e6 or 4096."""
    for exponent in (9, 6):
        if count >= 10**exponent:
            return f"{count / 10**exponent:.6g}e{exponent}"
    return f"{count:.6g}"


def _formula(stage: int, elements: int, bits: list[int], ranks: int) -> str:
    """Format P (p + g + K o) in bytes, with the numbers filled in."""
    terms, whole = [f"{each / BITS:g}" for each in bits], len(bits) - stage
    shared = f"({' + '.join(terms[whole:])})" if stage > 1 else "".join(terms[whole:])
    parts = [*terms[:whole], f"{shared} / {ranks}"] if stage else terms
    return f"{count_text(elements)} x ({' + '.join(parts)})" if whole else f"{count_text(elements)} x {parts[0]}"


def _parameters(text: str) -> int:
    match = _COUNT.fullmatch(text.strip())
    value = float(match[1]) * COUNTS[match[2].lower()] if match else 0.0
    if not 1 <= value <= 1e18:
        raise UsageError(f"--parameters {text}: expected a number from 1 to 1e18, such as 10e9, 10B or 1.3M")
    return round(value)


def _bits(text: str) -> tuple[int, int, int]:
    numbers = [int(word) for word in re.findall(r"\b(\d{1,3})\b", text)]
    if not re.fullmatch(r"\d{1,3}(,\d{1,3},\d{1,3})?", text) or not all(1 <= each <= 64 for each in numbers):
        raise UsageError(
            f"--bits {text}: expected a number from 1 to 64, or three with commas, such as 16,16,32 for parameters, "
            "gradients and optimizer states"
        )
    first, second, third = numbers * (3 // len(numbers))
    return first, second, third


def _within(flag: str, value: int | None, least: int, most: int, such: str) -> int:
    if value is None or not least <= value <= most:
        found = f"{flag} is missing" if value is None else f"{flag} {value}"
        raise UsageError(f"{found}: expected a whole number from {least} to {most}, such as {flag} {such}")
    return value
