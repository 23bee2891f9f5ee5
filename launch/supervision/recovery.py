"""What becomes of a run after an attempt has ended: pure. Again, on which nodes, after how long; or not, and why.

the attempt ended        done, stopped, refused, storage, …          → so does the run
the same exception       at the same step as the time before         → 93: the program is wrong, not the machine
the same last line       and code of a program, three times          → 93
three in a row           without a new checkpoint                    → 93: starting again does not help
the budget is used up    restart.max                                 → the attempt's own verdict
else                                                                 → again, at once; after a second failure in a
                                                                       row without progress later and later
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from muster.jobs.basics import exits
from muster.jobs.basics.words import counted
from muster.jobs.spec.failover import RestartSettings
from muster.launch.records.verdict import Verdict

IN_VAIN: Final = 3  # attempts without a new checkpoint
BLAMED: Final = 2  # of the last WATCHED attempts: then a node is left out
WATCHED: Final = 3
LONGEST_BACKOFF_S: Final = 60.0

# Restarting changes nothing about these: somebody wanted the end, or has to change something first.
FINAL: Final = frozenset(
    {
        exits.DONE,
        exits.USAGE,
        exits.BAD_JOB,
        exits.NO_CHECKPOINT,
        exits.RUN_FOLDER,
        exits.STORAGE,
        exits.REQUEUE,
        exits.REFUSED,
        exits.DO_NOT_RESTART,
        exits.STOPPED,
    }
)
NAMES_STEP: Final = re.compile(r"\bnot finite at step \d")
NO_PROGRAM: Final = frozenset({126, 127})


@dataclass(frozen=True)
class Past:
    """An attempt that has ended, as far as decisions depend on it."""

    verdict: Verdict
    culprit: int | None  # slot of the node on which the first failure was
    step: int  # steps that were done when it failed
    committed: bool  # it made a checkpoint

    @property
    def exception(self) -> str:
        """What the failing rank of ours raised; "" for a signal, a lost node, a hang."""
        first = self.verdict.first
        return first.message if first is not None and first.rank is not None and first.signal is None else ""

    @property
    def failure(self) -> tuple[str, int]:
        """What was raised and after how many steps; but 0 if it names its step itself, which a GPU may tell later."""
        return self.exception, 0 if NAMES_STEP.search(self.exception) else self.step

    @property
    def last_word(self) -> str:
        """How a program of the user's failed, which tells no step: its code and the last line that it wrote."""
        first = self.verdict.first
        if first is None or first.ours or first.signal is not None or not first.last_lines:
            return ""
        return f"code {first.code}: {first.last_lines[-1]}"


@dataclass(frozen=True)
class Decision:
    """Whether there is another attempt; if not, `verdict` is the run's."""

    verdict: Verdict
    again: bool = False
    delay_s: float = 0.0


def decide(past: Sequence[Past], settings: RestartSettings | None, *, saves: bool) -> Decision:
    """Decide after the last of `past`, the attempts of this supervisor; `saves`: the job makes checkpoints."""
    last = past[-1]
    verdict = last.verdict
    if settings is None or is_final(verdict):
        return Decision(verdict)
    if len(past) > 1 and last.exception and last.failure == past[-2].failure:
        return Decision(_hopeless(verdict, f"the same failure at the same step ({last.step}) twice"))
    words = [each.last_word for each in past[-IN_VAIN:]]
    if len(words) == IN_VAIN and words[0] and len(set(words)) == 1:
        return Decision(_hopeless(verdict, f"the same failure {IN_VAIN} times in a row ({words[0]})"))
    vain = in_vain(past)
    if saves and vain >= IN_VAIN:
        return Decision(_hopeless(verdict, f"{vain} attempts in a row without a new checkpoint"))
    if len(past) > settings.max:
        used = f"; {counted(settings.max, 'restart')} used up (restart.max)" if settings.max else ""
        return Decision(Verdict(verdict.code, verdict.message + used, verdict.first, verdict.victims))
    # The first failure after progress is met at once; what fails again and again is given time.
    delay_s = 0.0 if vain <= 1 else min(settings.backoff * 2 ** (vain - 2), LONGEST_BACKOFF_S)
    return Decision(verdict, again=True, delay_s=delay_s)


def is_final(verdict: Verdict) -> bool:
    """Say whether a restart could not change anything."""
    first = verdict.first
    if first is not None and not first.ours:  # a program of the user's may mean anything by its codes
        return verdict.code in NO_PROGRAM
    return verdict.code in FINAL or (first is not None and first.signal is None and verdict.code in NO_PROGRAM)


def in_vain(past: Sequence[Past]) -> int:
    """Count the attempts at the end that made no checkpoint."""
    count = 0
    for each in reversed(past):
        if each.committed:
            break
        count += 1
    return count


def blamed(past: Sequence[Past]) -> frozenset[int]:
    """Return the slots that were to blame for two of the last three attempts."""
    recent = [each.culprit for each in past[-WATCHED:]]
    return frozenset(slot for slot in recent if slot is not None and recent.count(slot) >= BLAMED)


@dataclass(frozen=True)
class Choice:
    """The slots of the next attempt, in node order; `revive`: those of them whose agent must be started first."""

    slots: tuple[int, ...]
    revive: tuple[int, ...] = ()


def choose(
    before: Sequence[int],
    alive: Sequence[int],
    *,
    wanted: int,
    least: int,
    avoid: frozenset[int],
    revivable: Sequence[int],
    fits: Callable[[Sequence[int]], bool],
) -> Choice | None:
    """Choose the nodes of the next attempt; None where too few are left.

    `before` are the slots of the attempt that ended, `alive` those with an agent, `wanted` and `least` numbers of
    nodes, `avoid` the slots not to use as long as there are others, `revivable` lost ones whose agent can be started
    again, and `fits` says whether the job can run on some slots. Nodes that stay keep their order; spares replace;
    fewer are better than waiting for the lost; with too few, the lost are waited for, then the avoided are used.
    """
    kept = [slot for slot in before if slot in alive and slot not in avoid]
    spare = [slot for slot in alive if slot not in before and slot not in avoid]
    for candidates in ([*kept, *spare], [*kept, *spare, *(slot for slot in alive if slot in avoid)]):
        for count in range(min(wanted, len(candidates)), least - 1, -1):
            if fits(candidates[:count]):
                return Choice(tuple(candidates[:count]))
    back = [slot for slot in before if slot in alive or slot in revivable]
    for count in range(min(wanted, len(back)), least - 1, -1):
        slots = tuple(back[:count])
        if fits(slots):
            return Choice(slots, tuple(slot for slot in slots if slot not in alive))
    return None


def _hopeless(verdict: Verdict, why: str) -> Verdict:
    return Verdict(exits.DO_NOT_RESTART, f"{why}: {verdict.message}", verdict.first, verdict.victims)
