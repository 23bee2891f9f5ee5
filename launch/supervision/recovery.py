"""Decide what to do after an attempt ends: restart (on which nodes, after what delay) or give up (and why). Pure.

    the attempt ended        to grow: lost nodes are back                → restart at once; not counted
    it began in place        and did not complete a step                 → restart at once, all ranks
    the attempt ended        done, stopped, refused, storage, …          → the run ends
    the same exception       at the same step as the time before         → 93: the program is wrong, not the machine
    the same last line       and code of a program, three times          → 93
    three in a row           without a new checkpoint                    → 93: a restart does not help
    the budget is used up    restart.max                                 → the attempt's own verdict
    else                                                                 → restart at once; from the second failure in a
                                                                           row without progress, with growing delays

An outage (a lost node, or a broken connection between nodes) is not the program's fault. The run waits until the outage
is over, and outages never end a run with exit code 93.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Final

from muster.jobs.basics import exits
from muster.jobs.basics.words import counted
from muster.jobs.spec.failover import RestartSettings
from muster.launch.records.verdict import Verdict
from muster.launch.supervision.progress import without_duration

IN_VAIN: Final = 3  # number of attempts in a row without a new checkpoint after which the run ends
BLAMED: Final = 2  # a node blamed for this many of the last WATCHED attempts is avoided
WATCHED: Final = 3
LONGEST_BACKOFF_S: Final = 60.0
OUTAGE_S: Final = 2.0  # delay before the second restart in a row after an outage; doubles each time

# Muster's exit codes after which a restart may help. All others mean a requested end, or a job that must change.
AGAIN: Final = frozenset({exits.UNREACHABLE, exits.INFRASTRUCTURE, exits.TIMEOUT})
FINAL: Final = frozenset(row.code for row in exits.TABLE) - AGAIN
NAMES_STEP: Final = re.compile(r"\bnot finite at step \d")
NO_PROGRAM: Final = frozenset({126, 127})


@dataclass(frozen=True)
class Past:
    """The facts about an ended attempt on which decisions depend."""

    verdict: Verdict
    culprit: int | None  # slot of the node of the first failure
    step: int  # steps done when it failed
    committed: bool  # a checkpoint was committed
    outage: bool = False  # nodes, or connections between nodes, were lost
    grown: bool = False  # the attempt was stopped to continue on more nodes
    unproven: bool = False  # its ranks continued from the attempt before, and completed no step

    @property
    def exception(self) -> str:
        """The error message of the rank that failed first; "" if it gave none, or for a signal or a lost node."""
        first = self.verdict.first
        return first.message if first is not None and first.rank is not None and first.signal is None else ""

    @property
    def failure(self) -> tuple[str, int]:
        """The exception and the step at which it was reported. Two attempts with equal pairs failed in the same way.

        The exception is without the duration of a hang. The step is 0 if the message names the step, because a GPU may
        report the same failure some steps later.
        """
        return without_duration(self.exception), 0 if NAMES_STEP.search(self.exception) else self.step

    @property
    def last_word(self) -> str:
        """The failure of a user's program, whose step is unknown: its exit code and the last line that it wrote."""
        first = self.verdict.first
        if first is None or first.ours or first.signal is not None or not first.last_lines:
            return ""
        return f"code {first.code}: {first.last_lines[-1]}"


@dataclass(frozen=True)
class Decision:
    """The decision after an attempt. `again`: another attempt follows; if not, `verdict` is the run's."""

    verdict: Verdict
    again: bool = False
    delay_s: float = 0.0


def decide(past: Sequence[Past], settings: RestartSettings | None, *, saves: bool) -> Decision:
    """Decide whether another attempt follows the last one of `past`. `saves`: the job makes checkpoints."""
    last = past[-1]
    verdict = last.verdict
    if last.grown:
        return Decision(verdict, again=True)
    if settings is None or (is_final(verdict) and not last.unproven):
        return Decision(verdict)
    if not (last.outage or last.unproven) and (why := _why_hopeless(past, saves=saves)):
        return Decision(_hopeless(verdict, why))
    if sum(not each.grown for each in past) > settings.max:
        used = f"; {counted(settings.max, 'restart')} used up (restart.max)" if settings.max else ""
        first, *more = verdict.message.split("\n")
        message = "\n".join((first + used, *more))
        return Decision(replace(verdict, message=message))
    # The first restart after progress is immediate; repeated failures are followed by growing delays.
    first_s, count = (OUTAGE_S, outages(past)) if last.outage else (settings.backoff, in_vain(past))
    delay_s = 0.0 if count <= 1 else min(first_s * 2 ** (count - 2), LONGEST_BACKOFF_S)
    return Decision(verdict, again=True, delay_s=delay_s)


def _why_hopeless(past: Sequence[Past], *, saves: bool) -> str:
    """Return why another attempt would fail like the last one, or "" if it might not."""
    failed = [each for each in past if not (each.outage or each.grown)]
    last = failed[-1]
    if len(failed) > 1 and last.exception and last.failure == failed[-2].failure:
        return f"the same failure at the same step ({last.step}) twice"
    words = [each.last_word for each in failed[-IN_VAIN:]]
    if len(words) == IN_VAIN and words[0] and len(set(words)) == 1:
        return f"the same failure {IN_VAIN} times in a row ({words[0]})"
    vain = in_vain(past)
    return f"{vain} attempts in a row without a new checkpoint" if saves and vain >= IN_VAIN else ""


def is_final(verdict: Verdict) -> bool:
    """Return whether no restart can help."""
    first = verdict.first
    if first is not None and not first.ours:  # the exit codes of a user's program may mean anything
        return verdict.code in NO_PROGRAM
    return verdict.code in FINAL or (first is not None and first.signal is None and verdict.code in NO_PROGRAM)


def in_vain(past: Sequence[Past]) -> int:
    """Count the attempts since the last checkpoint or outage. Failures before an outage may have been part of it."""
    recent = takewhile(lambda each: not (each.committed or each.outage), reversed(past))
    return sum(not (each.grown or each.unproven) for each in recent)


def outages(past: Sequence[Past]) -> int:
    """Count the attempts at the end of `past` that made no checkpoint before an outage ended them."""
    return sum(1 for _ in takewhile(lambda each: each.outage and not each.committed, reversed(past)))


def blamed(past: Sequence[Past]) -> frozenset[int]:
    """Return the slots that were blamed for two of the last three failures.

    If ranks are lost at once, an attempt in place begins with the first loss and ends with the second. This is one
    failure.
    """
    at_once = [False, *(each.unproven and not last.grown for last, each in pairwise(past))]
    recent = [each.culprit for each, same in zip(past, at_once, strict=False) if not (same or each.grown)][-WATCHED:]
    return frozenset(slot for slot in recent if slot is not None and recent.count(slot) >= BLAMED)


@dataclass(frozen=True)
class NodeChoice:
    """The slots of the next attempt, in node order. `revive`: the slots whose agents must be restarted first."""

    slots: tuple[int, ...]
    revive: tuple[int, ...] = ()


def choose(
    before: Sequence[int],
    alive: Sequence[int],
    *,
    wanted: int,
    least: int,
    avoid: Sequence[frozenset[int]],
    revivable: Sequence[int],
    fits: Callable[[Sequence[int]], bool],
) -> NodeChoice | None:
    """Choose the nodes of the next attempt; return None if too few are left.

    `before`: the slots of the ended attempt. `alive`: the slots with an agent. `wanted`, `least`: the largest and the
    smallest number of nodes. `avoid`: groups of slots to use only if no others are left; the first group is used before
    the second. `revivable`: lost slots whose agents can be restarted. `fits`: returns whether the job can run on a
    sequence of slots.

    Nodes of the ended attempt keep their order; spares and returned nodes fill the gaps. Running on fewer nodes is
    preferred to waiting for lost ones. If there are too few nodes, avoided nodes are used, too. Only if that is not
    enough does the run wait for lost nodes.
    """
    kept = [slot for slot in before if slot in alive]
    left = [*kept, *(slot for slot in alive if slot not in before)]
    rank = {slot: max((place for place, group in enumerate(avoid, 1) if slot in group), default=0) for slot in left}
    for allowed in range(len(avoid) + 1):
        candidates = sorted((slot for slot in left if rank[slot] <= allowed), key=rank.__getitem__)
        for count in range(min(wanted, len(candidates)), least - 1, -1):
            if fits(candidates[:count]):
                return NodeChoice(tuple(candidates[:count]))
    lost = [slot for slot in revivable if slot not in before]
    back = [*(slot for slot in before if slot in alive or slot in revivable), *left[len(kept) :], *lost]
    for count in range(min(wanted, len(back)), least - 1, -1):
        slots = tuple(back[:count])
        if fits(slots):
            return NodeChoice(slots, tuple(slot for slot in slots if slot not in alive))
    return None


def largest_part(slots: Sequence[int], cuts: Collection[frozenset[int]]) -> list[int]:
    """Return the largest group of slots that one slot can reach. `cuts`: pairs that cannot reach each other."""
    parts = ([slot for slot in slots if frozenset((slot, each)) not in cuts] for each in slots)
    return max(parts, key=len, default=[]) if cuts else list(slots)


def _hopeless(verdict: Verdict, why: str) -> Verdict:
    return replace(verdict, code=exits.DO_NOT_RESTART, message=f"{why}: {verdict.message}")
