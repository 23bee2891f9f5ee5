"""The attempts of a run as text: one block per attempt, then the totals."""

from collections.abc import Mapping
from typing import Final

from muster.jobs.basics.words import counted
from muster.launch.common import screen
from muster.launch.look.history import PARTS, AttemptHistory, AttemptRecord

MOST_HOSTS: Final = 6
LEAST_SHARE: Final = 0.0005
NEWLINE: Final = "\n"
UNDER: Final = "\n" + " " * 9  # starts a continuation line of a fact


def attempt_lines(history: AttemptHistory, *, ended: str = "") -> list[str]:
    """Format every attempt and the totals. `ended`, why the run is over, is omitted if it repeats the last cause."""
    lines = []
    for each in history.attempts:
        lines += [_head(each), *(f"  {what:7}{text.replace(NEWLINE, UNDER)}" for what, text in _facts(each))]
    failed = sum(each.failed for each in history.attempts)
    lost = f"{_steps(history.lost_steps)} and {screen.duration(history.lost_s)} lost"
    parts = [counted(len(history.attempts), "attempt"), f"{failed} failed", lost]
    if history.supervised_s:
        parts.append(f"{screen.duration(history.supervised_s)} in all")
    if history.ettr is not None:
        parts.append(f"effective time ratio {history.ettr:.1%}".replace("%", " %"))
    lines.append(f"total    {', '.join(parts)}")
    if history.shares:
        lines.append(f"goodput  {shares_text(history.shares)}")
    if ended and ended != history.attempts[-1].cause:
        lines.append(f"ended    {ended}")
    return lines


def shares_text(shares: Mapping[str, float]) -> str:
    """Format the shares of a run's time, without those that are nearly 0."""
    shown = ((kind, share) for kind, share in shares.items() if share >= LEAST_SHARE or kind == "useful")
    return ", ".join(f"{kind.replace('_', ' ')} {100 * share:.1f} %" for kind, share in shown)


def _head(each: AttemptRecord) -> str:
    """Format the first line of an attempt: ranks, nodes, mode, and steps."""
    parts = [f"attempt {each.attempt}"]
    if each.world_size is not None:
        size = counted(each.world_size, "rank")
        if each.hosts:
            names = list(dict.fromkeys(each.hosts))
            named = f" ({', '.join(names)})" if 1 < len(names) <= MOST_HOSTS else ""
            size += f" on {counted(len(each.hosts), 'node')}{named}"
        parts.append(size)
    if each.mode:
        parts.append(each.mode)
    if each.last_step is not None:
        begun = f"from {each.origin}" if each.origin else "from the beginning"
        done = f"steps {each.from_step + 1}-{each.last_step}" if each.last_step > each.from_step else "no step"
        parts.append(f"{begun}, {done}")
    return ", ".join(parts)


def _facts(each: AttemptRecord) -> list[tuple[str, str]]:
    facts = []
    if each.cause:
        facts.append(("cause" if each.failed else "end", each.cause))
    elif each.ended is None:
        facts.append(("now", "running"))
    if each.compared:
        far = f"differ by at most {each.worst:.1e}" if each.worst else "are identical"
        facts.append(("again", f"losses of {_steps(each.compared)} that were repeated {far}"))
    if each.cut_short and each.last_step is not None:
        facts.append(("lost", _steps(each.lost_steps) + _seconds(each.lost_s)))
    elif each.cut_short and each.lost_s:
        facts.append(("lost", _seconds(each.lost_s).removeprefix(" and ")))
    if each.idle_s is not None:
        facts.append(("then", f"no supervisor for {screen.duration(each.idle_s)}"))
    elif each.decided and each.cut_short:
        facts.append(("then", each.decided))
    return facts


def _steps(count: int) -> str:
    return counted(count, "step") if count else "no step"


def _seconds(lost_s: Mapping[str, float]) -> str:
    if not lost_s:
        return ""
    parts = ", ".join(f"{part.removesuffix('_s')} {lost_s[part]:.2f}" for part in PARTS if part in lost_s)
    return f" and {screen.duration(sum(lost_s.values()))}: {parts}"
