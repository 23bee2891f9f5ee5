"""The table of `muster check`, with one row per node, and the conclusions drawn from it. Pure.

answers (inspection.py) ── judges ──→ rows ──→ table, JSON, exit code, the option that leaves out the bad nodes
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from muster.jobs.basics import exits
from muster.jobs.hosts import nodelist
from muster.launch.check.judges import BAD, COLUMNS, GOOD, WARNING, Answer, Expected, NodeProperty, Usual, judged

QUIET: Final = ("program", "GPUs", "files")


@dataclass(frozen=True)
class NodeRow:
    """The row of one node."""

    node: int
    host: str
    cells: dict[str, NodeProperty]

    @property
    def state(self) -> str:
        """The worst state of its cells."""
        states = {cell.state for cell in self.cells.values()}
        return next(state for state in (BAD, WARNING, GOOD) if state in states or state == GOOD)


def rows(answers: Sequence[Answer], expected: Expected) -> list[NodeRow]:
    """Return the row of every node."""
    usual = Usual.of(answers)
    found = []
    for node, answer in enumerate(answers):
        cells = {title: judged(title, node, answer, expected, usual) for title in COLUMNS}
        found.append(NodeRow(node, answer.host, {"agent": _agent(answer), **cells}))
    return _one_machine(found, answers, expected)


def exit_code(found: Sequence[NodeRow], answers: Sequence[Answer]) -> int:
    """Return 0 if no node is bad, 69 if a node cannot be reached, else 78."""
    bad = [row for row in found if row.state == BAD]
    if not bad:
        return exits.DONE
    lost = any(answer.error is not None and answer.error.exit_code == exits.UNREACHABLE for answer in answers)
    return exits.UNREACHABLE if lost or any(row.cells["master"].state == BAD for row in bad) else exits.REFUSED


def without(found: Sequence[NodeRow]) -> str:
    """Return the list of nodes to leave out; "" if there are none, or if none would remain."""
    bad = [row.host for row in found if row.state == BAD]
    return nodelist.fold(bad) if len(bad) < len(found) else ""


def titles(found: Sequence[NodeRow]) -> list[str]:
    """List the columns to show. A column in QUIET is shown only if it reports a problem."""
    said = {title: {row.cells[title].text for row in found} - {"-", "ok"} for title in found[0].cells}
    return [title for title, texts in said.items() if texts or title not in QUIET]


def remarks(found: Sequence[NodeRow], state: str) -> list[str]:
    """Return one line for each distinct reason of cells in this state, with the affected nodes and the remedy."""
    reasons: dict[str, list[str]] = {}
    for row in found:
        for cell in row.cells.values():
            if cell.state == state:
                reasons.setdefault(cell.why, []).append(row.host)
    return [f"{nodelist.fold(hosts)}: {why}" for why, hosts in reasons.items()]


def _agent(answer: Answer) -> NodeProperty:
    if answer.error is not None:
        return NodeProperty("failed", BAD, str(answer.error).removeprefix(f"{answer.host}: "))
    return NodeProperty("ok")


def _one_machine(found: list[NodeRow], answers: Sequence[Answer], expected: Expected) -> list[NodeRow]:
    """Warn if two host names mean the same machine, which would then do the work of both."""
    seen: dict[str, str] = {}
    for row, answer in zip(found, answers, strict=True):
        machine = answer.facts.get("machine")
        if machine is None or not expected.remote or row.cells["agent"].state == BAD:
            continue
        if first := seen.get(machine):
            why = f"is the same machine as {first}; remove one of the two names from the hosts"
            row.cells["agent"] = NodeProperty("twice", WARNING, why)
        seen.setdefault(machine, row.host)
    return found
