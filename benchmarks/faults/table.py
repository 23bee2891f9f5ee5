"""Rows before text: what a fault is, what came of it, and the table and JSON of all."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from faults.bench import Bench

ONE_MACHINE = "one machine"
BOX = "box"


@dataclass(frozen=True)
class Outcome:
    """What came of a fault; None where there is nothing to measure."""

    detected_s: float | None = None  # to the first row of events.jsonl that tells of it
    resumed_s: float | None = None  # to the first step of the next attempt
    lost_steps: int | None = None  # steps that had to be done again
    equal: bool | None = None  # all tensors at the end as after the uninterrupted run
    code: int | None = None
    verdict: str = ""  # its class
    attempts: int = 0
    notes: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()  # expectations of this row's own that were not met


@dataclass(frozen=True)
class Expected:
    """What has to come of a fault; None: not asked."""

    code: int = 0
    equal: bool | None = True
    attempts: int | None = None
    detect_s: float | None = None
    resume_s: float | None = None
    lost_steps: int | None = None

    def failures(self, outcome: Outcome, *, timed: bool = True) -> list[str]:
        """List what an outcome lacks; `timed`: limits of time count too."""
        found = list(outcome.wrong)
        if outcome.code != self.code:
            found.append(f"exit code {outcome.code}, wanted {self.code}")
        if self.equal is not None and outcome.equal is not self.equal:
            found.append(
                "not the weights of the uninterrupted run" if self.equal else "equal weights were not expected"
            )
        if self.attempts is not None and outcome.attempts != self.attempts:
            found.append(f"{outcome.attempts} attempts, wanted {self.attempts}")
        if self.lost_steps is not None and (outcome.lost_steps is None or outcome.lost_steps > self.lost_steps):
            found.append(f"{outcome.lost_steps} steps lost, at most {self.lost_steps}")
        limits = (("detected", outcome.detected_s, self.detect_s), ("resumed", outcome.resumed_s, self.resume_s))
        for what, measured, limit in limits if timed else ():
            if limit is not None and (measured is None or measured > limit):
                shown = "never" if measured is None else f"after {measured:.2f} s"
                found.append(f"{what} {shown}, wanted within {limit:g} s")
        return found


@dataclass(frozen=True)
class Fault:
    """One row of the matrix; `number` is the fault's, of which there may be several rows."""

    number: int
    name: str
    inject: str
    expected: Expected
    run: "Callable[[Bench], Outcome]"
    where: str = ONE_MACHINE
    quick: bool = False
    root: bool = False  # needs to mount

    @property
    def key(self) -> str:
        """The row's name in tests and on the command line."""
        return f"{self.number} {self.name}"


@dataclass(frozen=True)
class Absent:
    """A fault, or a part of one, that this machine cannot have."""

    number: int
    name: str
    reason: str


@dataclass
class Row:
    """A fault, what came of it, and what was wrong with that."""

    fault: Fault
    outcome: Outcome
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def record(self) -> Mapping[str, Any]:
        """Return the row of the JSON."""
        fault = self.fault
        return {
            **{name: getattr(fault, name) for name in ("number", "name", "inject", "where")},
            "expected": asdict(fault.expected),
            **asdict(self.outcome),
            "reached": not self.failures,
            "failures": self.failures,
            "seconds": round(self.seconds, 2),
        }


HEAD = f"{'#':>3}  {'fault':<44}{'detected':>9} {'resumed':>9} {'lost':>5} {'equal':>6} {'code':>5} {'class':<15}"
UNITS = f"{'':>3}  {'':<44}{'s':>9} {'s':>9} {'steps':>5}"


def line(row: Row) -> str:
    """Return a row as a line of the table."""
    fault, found = row.fault, row.outcome
    equal = {True: "yes", False: "NO", None: "-"}[found.equal]
    text = (
        f"{fault.number:>3}  {fault.name:<44}{_seconds(found.detected_s):>9} {_seconds(found.resumed_s):>9} "
        f"{'-' if found.lost_steps is None else found.lost_steps:>5} {equal:>6} "
        f"{'-' if found.code is None else found.code:>5} {found.verdict:<15}{'ok' if not row.failures else 'FAILED'}"
    )
    more = [*row.failures, *(f"({note})" for note in found.notes)]
    return "\n".join([text, *(f"{'':>5}{each}" for each in more)])


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
