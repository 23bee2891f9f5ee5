"""The records of a run folder as they stand in its files: sorted, not yet judged (`launch/look/runstate.py` does)."""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from jobs.files import read_lines
from jobs.rundir import RunDir

TAIL_BYTES: Final = 1 << 16
TOLD: Final = frozenset({"resuming", "loaded", "first_step", "replayed", "saved", "missed", "hang", "draining"})


@dataclass
class Rows:
    """The rows of events.jsonl that count: the newest of each, per rank and node of the newest attempt.

    `told` are what ranks and supervisor last said of the newest attempt, by event; `hosts` those of every attempt of
    the newest supervisor, oldest first.
    """

    submitted: dict[str, Any] = field(default_factory=dict)
    attempt: dict[str, Any] = field(default_factory=dict)
    attempts: int = 0
    hosts: list[list[str]] = field(default_factory=list)
    started: list[dict[str, Any]] = field(default_factory=list)
    joined: bool = False
    exited: list[dict[str, Any]] = field(default_factory=list)
    stopping: bool = False
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    restarting: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)
    ended: dict[str, Any] | None = None
    last_time: float | None = None

    def begin_attempt(self, row: dict[str, Any]) -> None:
        """Forget what an earlier attempt started; what was said of this one before its ranks were started counts."""
        self.attempt, self.attempts = row, self.attempts + 1
        self.started, self.joined, self.exited, self.stopping = [], False, [], False
        self.told = {name: said for name, said in self.told.items() if said.get("attempt") == row.get("attempt")}
        self.restarting = self.ended = None
        self.hosts.append([str(host) for host in row.get("hosts") or ()])

    def begin_supervisor(self, row: dict[str, Any]) -> None:
        """Forget what an earlier supervisor had under way: this one has not started anything yet."""
        self.begin_attempt({})
        self.submitted, self.attempts, self.hosts = row, self.attempts - 1, []


def read_rows(run: RunDir) -> Rows:
    """Sort the rows of events.jsonl; the end of an attempt is not the end of the run, whose last row is `ended`."""
    rows = Rows()
    for row in read_lines(run.events):
        rows.last_time = real(row.get("time")) or rows.last_time
        match row.get("event"):
            case "submitted":
                rows.begin_supervisor(row)
            case "attempt":
                rows.begin_attempt(row)
            case "started":
                rows.started.append(row)
            case "joined":
                rows.joined = True
            case "exited":
                rows.exited.append(row)
            case "stopping":
                rows.stopping = True
            case "restarting":
                rows.restarting = row
            case "warning":
                rows.warnings.append(str(row.get("text", "")))
            case "ended":
                rows.ended, rows.restarting = row, None
            case str(name) if name in TOLD:
                rows.told[name] = row
    return rows


def last_metrics(run: RunDir) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the newest step row and the newest evaluation row, from the end of a file of any size; {} if none."""
    step: dict[str, Any] = {}
    evaluation: dict[str, Any] = {}
    for row in _last_rows(run.metrics):
        if row.get("evaluation"):
            evaluation = evaluation or row
        else:
            return row, evaluation
    return step, evaluation


def first_and_last_step(run: RunDir, attempt: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the first and the newest row that rank 0 wrote of its own steps in an attempt; {} if none."""
    path = run.attempt(attempt).metrics(0)
    last = next(_last_rows(path), {})
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        first = json.loads(file.readline(TAIL_BYTES))
        return (first if isinstance(first, dict) else {}), last
    return {}, last


def node_of_rank(run: RunDir, attempt: int) -> dict[int, int]:
    """Return which node each rank of an attempt runs on, as far as the folder says: node files, else `started` rows."""
    nodes: dict[int, int] = {}
    for row in read_lines(run.events):
        if row.get("event") == "started" and row.get("attempt", 0) == attempt:
            nodes.update((rank, row["node"]) for rank, _ in row.get("ranks", ()))
    for path in run.attempt(attempt).path.glob("node-*.json"):
        record = read_json(path)
        nodes.update((entry["rank"], record["node"]) for entry in record.get("ranks", ()))
    return nodes


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} when it is missing, unfinished or something else."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _last_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole rows in the last `TAIL_BYTES` of a JSON-lines file, newest first."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        size = os.fstat(descriptor).st_size
        begin = max(0, size - TAIL_BYTES)
        data = os.pread(descriptor, size - begin, begin)
    finally:
        os.close(descriptor)
    lines = data.split(b"\n")[:-1]
    for line in reversed(lines[1:] if begin else lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def number(value: Any) -> int | None:
    """Return a whole number of a record, None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def real(value: Any) -> float | None:
    """Return a number of a record as a float, None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
