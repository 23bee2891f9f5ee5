"""Choose the runs that `muster prune` removes: pure, from the states of all runs of a folder."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from muster.jobs.basics.errors import UsageError
from muster.launch.records.runstate import OVER, RunState

UNITS: Final = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


@dataclass(frozen=True)
class PruneRule:
    """The options of `muster prune`. A run must satisfy all options that are given.

    `states`: it is in one of these states. `older_s`: it ended more than this many seconds ago. `keep`: the number of
    newest runs to keep among the runs that satisfy the other two.
    """

    states: Collection[str] = tuple(OVER)
    older_s: float = 0.0
    keep: int = 0


def chosen(states: Sequence[RunState], rule: PruneRule, now: float) -> list[RunState]:
    """Return the runs to remove, oldest first. A run that may still be in progress is never chosen."""
    over = [state for state in states if state.is_over and state.state in rule.states]
    old = [state for state in over if now - end_of(state) > rule.older_s]
    old.sort(key=end_of)
    return old[: max(0, len(old) - rule.keep)]


def end_of(state: RunState) -> float:
    """Return when a run ended, as Unix seconds; for a lost run, when its last row was written."""
    if state.ended is not None:
        return state.ended
    return (state.started or 0.0) + (state.seconds or 0.0)


def age(text: str) -> float:
    """Read an age such as 90m, 12h, 30d or 8w; return seconds.

    Raises:
        UsageError: if `text` is not a number followed by one of the units.
    """
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([mhdw])", text)
    if found is None:
        raise UsageError(f"--older-than: must be a number with m, h, d or w, such as 12h or 30d, got {text!r}")
    return float(found[1]) * UNITS[found[2]]


def state_names(text: str) -> tuple[str, ...]:
    """Read a list of states, separated by commas.

    Raises:
        UsageError: if a name is not a state, or runs in that state are not over.
    """
    names = tuple(text.split(","))
    for name in names:
        if name not in OVER:
            raise UsageError(
                f"--state: {name!r} is not one of {', '.join(sorted(OVER))}; only runs that are over can be removed"
            )
    return names
