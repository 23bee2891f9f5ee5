"""The text of each event, printed by the supervisor's console and by commands that follow a run."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from muster.jobs.basics.words import counted
from muster.launch.common.fields import typed
from muster.launch.records.runrows import read_stragglers

Row = Mapping[str, Any]


def lines_of(row: Row) -> list[str]:
    """Return the lines for an event; an empty list for an event without a text, or an unknown one."""
    text = TEXTS.get(str(row.get("event")))
    return text(typed(row)).splitlines() if text is not None else []


def _attempt(row: Row) -> str:
    attempt = row.get("attempt", 0)
    which = f"attempt {attempt}: " if attempt else ""
    ranks = counted(row.get("world_size", 0), "rank")
    return f"{which}{ranks} start, master {row.get('master_addr')}:{row.get('master_port')}"


def _restarting(row: Row) -> str:
    hosts, delay_s = row.get("hosts", ()), row.get("delay_s", 0.0)
    wait = f" in {delay_s:g} s" if delay_s else ""
    if ranks := row.get("in_place"):
        continues = f"{counted(ranks, 'rank')} continue{'s' * (ranks == 1)}"
        return f"muster: {row.get('why')}\nattempt {row.get('attempt')} in place: {continues}"
    return f"muster: {row.get('why')}\nattempt {row.get('attempt')}{wait} on {counted(len(hosts), 'node')}"


def _hang(row: Row) -> str:
    seconds = row.get("seconds", 0.0)
    if row.get("phase") == "output":
        return f"no rank has written anything for {seconds:.0f} s"
    return f"no rank has made progress for {seconds:.0f} s; asking every rank for its stacks"


def _slow(row: Row) -> str:
    slow = read_stragglers(row.get("stragglers"))
    return "\n".join(f"muster: warning: slow: {each.name}: {each.evidence}" for each in slow) or "no rank is slow now"


TEXTS: Final[dict[str, Callable[[Row], str]]] = {
    "attempt": _attempt,
    "joined": lambda row: f"all ranks joined after {row.get('seconds', 0.0):.1f} s",
    "warning": lambda row: f"muster: warning: {row.get('text')}",
    "missed": lambda row: f"muster: warning: rank {row.get('rank')}: {row.get('message')}",
    "stopping": lambda row: f"stopping the ranks: {row.get('reason')}",
    "draining": lambda row: f"saving, then stopping: {row.get('by')}",
    "hang": _hang,
    "not_in_place": lambda row: f"muster: all ranks restart: {row.get('why')}",
    "slow": _slow,
    "resuming": lambda row: f"continuing from {row.get('checkpoint')}" + " in memory" * (row.get("memory") is True),
    "not_in_memory": lambda row: f"muster: {row.get('why')}; using the newest checkpoint on disk, if there is one",
    "restarting": _restarting,
}
