"""The verdict on an attempt: the earliest failure is its cause, and the victims are listed separately. Pure.

A rank's end has a cause:

    done      it returned 0
    stopped   it ended because Muster told it to
    peer      it lost its connection to another rank
    own       anything else: an exception, a signal from outside, a missing program

A rank that lost its connection is a victim if any rank failed for a reason of its own, even if the victim was seen
first: the kernel closes a dying process's sockets before its parent can see that it died.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from muster.jobs.basics import errors, exits
from muster.jobs.machine.linux import signal_number
from muster.launch.common import rankset
from muster.launch.wire.messages import Exited

MOST_VICTIMS: Final = 1000  # that a row describes one by one, so that the row stays short enough to be read

Cause = Literal["done", "stopped", "peer", "own"]


@dataclass(frozen=True)
class RankEnd:
    """The end of one rank or, if `rank` is None, of a whole node."""

    rank: int | None
    node: int
    host: str
    code: int | None
    signal: str | None
    ended: float
    cause: Cause
    message: str = ""
    last_lines: list[str] = field(default_factory=list)
    ours: bool = True  # True if the exit code is one of Muster's; a user's program may use other codes
    step: int | None = None  # steps done, as reported by the rank
    hung: bool = False  # alive, but not waiting where the other ranks wait

    @property
    def exit_code(self) -> int:
        """Return the exit code that a shell would see."""
        if self.signal is not None:
            return exits.SIGNAL_BASE + signal_number(self.signal)
        return self.code or 0

    def where(self) -> str:
        """Name the place: rank, node and host."""
        who = f"node {self.node}" if self.rank is None else f"rank {self.rank} on node {self.node}"
        return f"{who} ({self.host})"

    def sentence(self) -> str:
        """Describe the end in one line."""
        if self.rank is None:
            return f"{self.where()}: {self.message}"
        if self.hung:
            return f"{self.where()} {self.message}"
        how = f"was killed by {self.signal}" if self.signal else f"exited with code {self.code}"
        return f"{self.where()} {how}" + (f": {self.message}" if self.message else "")


@dataclass(frozen=True)
class Stop:
    """The reason why Muster stopped the ranks before they ended by themselves."""

    code: int
    message: str
    final: bool = False  # the run ends with this attempt, for example when a scheduler takes its nodes away
    why: str = ""

    @property
    def reason(self) -> str:
        """The reason in one or two words, for programs."""
        return self.why or {exits.STOPPED: "stopped", exits.REQUEUE: "requeue"}.get(self.code, "failure")


@dataclass(frozen=True)
class Verdict:
    """The outcome of an attempt, and its cause."""

    code: int
    message: str
    first: RankEnd | None = None
    victims: tuple[RankEnd, ...] = ()

    @property
    def name(self) -> str:
        """The class of the verdict."""
        first = self.first
        if first is not None and first.signal is None and not first.ours and first.code == self.code:
            return exits.FAILED_CLASS  # the program chose this code, so its meaning is unknown
        return exits.class_of(self.code)

    def record(self) -> dict[str, Any]:
        """Return the row for attempts.jsonl, without times and advice.

        Of the ranks behind the first MOST_VICTIMS victims, it has only ranges by cause: `more_victims`.
        """
        shown, more = self.victims[:MOST_VICTIMS], self.victims[MOST_VICTIMS:]
        ranks: dict[str, list[int]] = {}
        for each in more:
            if each.rank is not None:
                ranks.setdefault(each.cause, []).append(each.rank)
        shown += tuple(each for each in more if each.rank is None)
        folded = [f"{cause} {part}" for cause, some in ranks.items() for part in rankset.fold(some).split(", ")]
        return {
            "class": self.name,
            "code": self.code,
            "message": self.message,
            "first": asdict(self.first) if self.first else None,
            "victims": [asdict(victim) for victim in shown],
            **({"more_victims": folded} if folded else {}),
        }


def cause_of(
    code: int | None, signal: str | None, sent: str | None, failure: Mapping[str, Any], *, drained: bool = False
) -> Cause:
    """Determine the cause of a rank's end from its code or signal, the last signal that Muster sent, and its report.

    `drained`: whether the rank was asked to save and end.
    """
    if code == 0:
        return "done"
    if drained and code == exits.REQUEUE and not failure:
        return "stopped"
    if failure.get("peer"):
        return "peer"
    if sent is not None and (signal is not None or not failure):
        return "stopped"
    return "own"


def ending_of(message: Exited, node: int, host: str, *, ahead_s: float, ours: bool, drained: bool = False) -> RankEnd:
    """Return the ending described by an agent's `Exited` message; `ahead_s`: how far its clock is ahead of ours."""
    failure: Mapping[str, Any] = message.failure
    text = ""
    if failure:  # the messages of Muster's errors are clear without the type
        text = failure["message"] if hasattr(errors, failure["kind"]) else f"{failure['kind']}: {failure['message']}"
    return RankEnd(
        rank=message.rank,
        node=node,
        host=host,
        code=message.code,
        signal=message.signal,
        ended=message.ended - ahead_s,
        cause=cause_of(message.code, message.signal, message.sent, failure, drained=drained and ours),
        message=text,
        last_lines=list(message.last_lines),
        ours=ours,
        step=failure.get("step", message.steps),
    )


def judge(endings: Sequence[RankEnd], stop: Stop | None) -> Verdict:
    """Judge an attempt from its endings and from the request that stopped it, if there was one."""
    ordered = sorted(endings, key=lambda ending: ending.ended)
    failed = [each for each in ordered if each.cause in ("own", "peer")]
    first = next((each for each in failed if each.cause == "own"), failed[0] if failed else None)
    if stop is not None:
        return Verdict(stop.code, stop.message, None, tuple(each for each in ordered if each.cause != "done"))
    if first is None:
        ranks = sum(each.rank is not None and each.cause == "done" for each in ordered)
        return Verdict(exits.DONE, f"{ranks} rank{'s' * (ranks != 1)} ended with 0")
    victims = tuple(
        each for each in ordered if each is not first and each.cause != "done" and not _is_again(each, first)
    )
    message = "; ".join(filter(None, (first.sentence(), lost_too(victims))))
    return Verdict(first.exit_code, message, first, victims)


def lost_too(victims: Sequence[RankEnd]) -> str:
    """Name the nodes that were lost besides the first failure; "" if there are none."""
    nodes = [each.where() for each in victims if each.rank is None]
    return f"lost too: {', '.join(nodes)}" if nodes else ""


def _is_again(ending: RankEnd, first: RankEnd) -> bool:
    """Return whether this ending belongs to the rank that is already the first failure."""
    return ending.rank is not None and ending.rank == first.rank
