"""The table of `muster check`: one row per node, and the conclusions from it. Pure.

answers (inspection.py) ── judges ──→ rows ──→ table, JSON, exit code, the option that leaves out the bad nodes
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from muster.jobs.basics import exits
from muster.jobs.hosts import nodelist
from muster.launch.check.judges import BAD, COLUMNS, GOOD, WARNING, Answer, Cell, Expected, Usual, judged

QUIET: Final = ("program", "GPUs", "files")


@dataclass(frozen=True)
class Row:
    """One node's row."""

    node: int
    host: str
    cells: dict[str, Cell]

    @property
    def state(self) -> str:
        """The worst state of its cells."""
        states = {cell.state for cell in self.cells.values()}
        return next(state for state in (BAD, WARNING, GOOD) if state in states or state == GOOD)


def rows(answers: Sequence[Answer], expected: Expected) -> list[Row]:
    """Judge all nodes."""
    usual = Usual.of(answers)
    found = []
    for node, answer in enumerate(answers):
        cells = {title: judged(title, node, answer, expected, usual) for title in COLUMNS}
        found.append(Row(node, answer.host, {"agent": _agent(answer), **cells}))
    return _one_machine(found, answers, expected)


def exit_code(found: Sequence[Row], answers: Sequence[Answer]) -> int:
    """Return 0 if no node is bad, 69 if one cannot be reached, else 78."""
    bad = [row for row in found if row.state == BAD]
    if not bad:
        return exits.DONE
    lost = any(answer.error is not None and answer.error.exit_code == exits.UNREACHABLE for answer in answers)
    return exits.UNREACHABLE if lost or any(row.cells["master"].state == BAD for row in bad) else exits.REFUSED


def without(found: Sequence[Row]) -> str:
    """Return the list of nodes to leave out; "" if there are none, or if none would remain."""
    bad = [row.host for row in found if row.state == BAD]
    return nodelist.fold(bad) if len(bad) < len(found) else ""


def titles(found: Sequence[Row]) -> list[str]:
    """List the columns to show; those of QUIET only if they have something to report."""
    said = {title: {row.cells[title].text for row in found} - {"-", "ok"} for title in found[0].cells}
    return [title for title, texts in said.items() if texts or title not in QUIET]


def remarks(found: Sequence[Row], state: str) -> list[str]:
    """Return one line for each reason behind cells in this state, with its nodes and the remedy."""
    reasons: dict[str, list[str]] = {}
    for row in found:
        for cell in row.cells.values():
            if cell.state == state:
                reasons.setdefault(cell.why, []).append(row.host)
    return [f"{nodelist.fold(hosts)}: {why}" for why, hosts in reasons.items()]


def _agent(answer: Answer) -> Cell:
    if answer.error is not None:
        return Cell("failed", BAD, str(answer.error).removeprefix(f"{answer.host}: "))
    return Cell("ok")


def _one_machine(found: list[Row], answers: Sequence[Answer], expected: Expected) -> list[Row]:
    """Warn if two names are the same machine, because it would do the work of both."""
    seen: dict[str, str] = {}
    for row, answer in zip(found, answers, strict=True):
        machine = answer.facts.get("machine")
        if machine is None or not expected.remote or row.cells["agent"].state == BAD:
            continue
        if first := seen.get(machine):
            why = f"is the same machine as {first}; take one of the two names out of the hosts"
            row.cells["agent"] = Cell("twice", WARNING, why)
        seen.setdefault(machine, row.host)
    return found
