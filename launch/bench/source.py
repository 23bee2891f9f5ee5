"""The cost profile behind a prediction: the one named by `--profile`, or one built from `--link` and `--latency`."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from muster.jobs.basics.errors import UsageError
from muster.launch.bench.wanted import Wanted

if TYPE_CHECKING:
    from muster.collectives_bench.cost.profile import Profile

RATES: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
TIMES: Final = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)bit(?:/s|ps)?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us|ns)?", re.IGNORECASE)


def source_of(asked: Wanted) -> "Profile":
    """Return the profile that `--profile` names, or build one from `--link`.

    Raises:
        UsageError: if neither or both are given, or a value is invalid.
        JobFileError: if the file is not a profile.
    """
    from muster.collectives_bench.cost import profile

    if asked.link is not None and asked.profile is None:
        return profile.link(parse_rate(asked.link), parse_time(asked.latency or "0"), name=f"link of {asked.link}")
    if asked.profile is None or asked.link is not None:
        raise UsageError("give either --profile FILE.json (from muster bench fit) or --link RATE such as 100Gbit")
    if asked.latency is not None:
        raise UsageError(
            f"--latency {asked.latency}: belongs to --link; remove it, since a profile has its own latency"
        )
    return profile.load(Path(asked.profile))


def parse_rate(text: str) -> float:
    """Return a rate in bits per second. Errors as for `quantity`."""
    return quantity("--link", text, _RATE, RATES, "bits per second, such as 100Gbit or 25Gbit/s")


def parse_time(text: str) -> float:
    """Return a time in seconds. Errors as for `quantity`."""
    return quantity("--latency", text, _TIME, TIMES, "a time such as 50us or 0.2ms", least=0.0)


def quantity(
    flag: str, text: str, pattern: re.Pattern[str], units: Mapping[str, float], wanted: str, *, least: float = 1e-9
) -> float:
    """Read a number and its unit, which are the two groups of `pattern`.

    Raises:
        UsageError: if the text does not match the pattern, or the number is less than `least`.
    """
    match = pattern.fullmatch(text.strip())
    if match is None or float(match[1]) < least:
        raise UsageError(f"{flag} {text}: expected {wanted}")
    return float(match[1]) * units[(match[2] or "").lower()]
