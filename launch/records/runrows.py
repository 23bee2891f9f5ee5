"""Read and sort the records of a run folder. `launch/records/runstate.py` interprets them."""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics import reading
from muster.jobs.basics.errors import UsageError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import rankset
from muster.launch.common.event_rows import typed_lines
from muster.launch.common.fields import MOST_RANKS, below, text, typed_line
from muster.launch.common.fields import number as number  # re-exported for readers of rows
from muster.launch.common.fields import real as real
from muster.launch.records.stragglers import KINDS, PARTS, Slowness, Straggler
from muster.launch.records.verdict import RankEnd

TAIL_BYTES: Final = 1 << 17  # about 300 steps
WARM_UP_STEPS: Final = 5
LIVING: Final = "living ranks"  # the origin of an attempt in place, instead of a checkpoint's name
IN_MEMORY: Final = " in memory"  # after the name of a checkpoint that is in the memory of the nodes
MOST_WARNINGS: Final = 1000
OF_ENDING: Final = frozenset(each.name for each in fields(RankEnd))
TOLD: Final = frozenset(
    {"resuming", "loaded", "first_step", "replayed", "saved", "missed", "hang", "draining", "session", "slow"}
)


@dataclass
class Rows:
    """The newest rows of events.jsonl of each kind, per rank and node of the newest attempt.

    `told`: the newest attempt's newest row of each event that ranks or the supervisor report. `hosts`: the newest
    attempt's hosts. `all_hosts`: the hosts of every attempt of the newest supervisor. `asked`: the newest request to
    stop the run. Memory use is small for a file of any size.
    """

    submitted: dict[str, Any] = field(default_factory=dict)
    attempt: dict[str, Any] = field(default_factory=dict)
    attempts: int = 0
    hosts: list[str] = field(default_factory=list)
    all_hosts: dict[str, None] = field(default_factory=dict)
    by_node: dict[int | None, dict[str, Any]] = field(default_factory=dict)
    joined: bool = False
    by_rank: dict[tuple[int | None, int | None], dict[str, Any]] = field(default_factory=dict)
    stopping: bool = False
    asked: str = ""
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    restarting: dict[str, Any] | None = None
    warnings: dict[str, None] = field(default_factory=dict)
    ended: dict[str, Any] | None = None
    last_time: float | None = None

    @property
    def started(self) -> list[dict[str, Any]]:
        """The newest `started` row of each node."""
        return list(self.by_node.values())

    @property
    def exited(self) -> list[dict[str, Any]]:
        """The newest `exited` row of each rank; a row without a rank is about a whole node."""
        return list(self.by_rank.values())

    def take(self, row: dict[str, Any]) -> None:
        """Process the next row. Only an `ended` row means that the run has ended; other rows may end an attempt."""
        self.last_time = row.get("time") or self.last_time
        match row.get("event"):
            case "submitted":
                self.begin_supervisor(row)
            case "attempt":
                self.begin_attempt(row)
            case "started":
                self.by_node[row.get("node")] = row
            case "joined":
                self.joined = True
            case "exited":
                self.by_rank[row.get("rank"), row.get("node")] = row
            case "stopping":
                self.stopping = True
            case "asked":
                self.asked = row.get("reason", "")
            case "restarting":
                self.restarting = row
            case "warning":
                if len(self.warnings) < MOST_WARNINGS:
                    self.warnings[row.get("text", "")] = None
            case "ended":
                self.ended, self.restarting = row, None
            case str(name) if name in TOLD:
                self.told[name] = row

    def begin_attempt(self, row: dict[str, Any]) -> None:
        """Drop the rows of an earlier attempt, but keep this attempt's events from before its ranks were started."""
        self.attempt, self.attempts = row, self.attempts + 1
        self.by_node, self.joined, self.by_rank, self.stopping = {}, False, {}, False
        self.told = {name: said for name, said in self.told.items() if said.get("attempt") == row.get("attempt")}
        self.restarting = self.ended = None
        self.hosts = row.get("hosts", [])
        if len(self.all_hosts) < MOST_RANKS:
            self.all_hosts.update(dict.fromkeys(self.hosts))

    def begin_supervisor(self, row: dict[str, Any]) -> None:
        """Drop the rows of an earlier supervisor; the new one has not started anything yet."""
        self.begin_attempt({})
        self.submitted, self.attempts, self.all_hosts, self.asked = row, self.attempts - 1, {}, ""


def read_rows(run: RunDir) -> Rows:
    """Sort all rows of events.jsonl."""
    rows = Rows()
    for row in typed_lines(run.events):
        rows.take(row)
    return rows


def supervisors(run: RunDir) -> int:
    """Count the supervisors that the run has had so far."""
    return sum(row.get("event") == "submitted" for row in typed_lines(run.events))


def had_session(run: RunDir) -> bool:
    """Return whether a program of the run has ever opened a session."""
    return any(row.get("event") == "session" for row in typed_lines(run.events))


def read_ending(row: Mapping[str, Any] | None) -> RankEnd | None:
    """Read the failure in a typed row. Rows of direct runs may lack fields; rows of later versions may have more."""
    if not row:
        return None
    given = {key: value for key, value in row.items() if key in OF_ENDING}
    defaults = {"rank": None, "node": 0, "host": "?", "code": None, "signal": None, "ended": row.get("time", 0.0)}
    return RankEnd(**{**defaults, "cause": "done" if row.get("code") == 0 else "own", **given})


def read_victims(row: Mapping[str, Any]) -> tuple[RankEnd, ...]:
    """Read the victims in a typed row of attempts.jsonl. Of those that it only lists as ranges, the rest is unknown."""
    victims = [*filter(None, map(read_ending, row.get("victims") or ()))]
    for line in row.get("more_victims") or ():
        cause, _, ranks = line.partition(" ")
        with suppress(UsageError):  # a row of a later version
            found = sorted(rankset.parse(ranks, option="more_victims", count=MOST_RANKS))
            victims += filter(None, (read_ending({"rank": rank, "cause": cause}) for rank in found))
    return tuple(victims)


def read_stragglers(records: Any) -> tuple[Straggler, ...]:
    """Return the valid stragglers in the value of an event row."""
    return (
        tuple(each for record in records if (each := _straggler(record)) is not None)
        if isinstance(records, list)
        else ()
    )


def _straggler(record: Any) -> Straggler | None:
    if not isinstance(record, dict):
        return None
    kind, host = text(record.get("kind")), text(record.get("host"))
    part, listed = record.get("part"), record.get("ranks")
    rank_of = below(MOST_RANKS)
    ranks = tuple(each for rank in listed if (each := rank_of(rank)) is not None) if isinstance(listed, list) else ()
    times: dict[str, Any] = {name: real(record.get(name)) for name in ("own_s", "least_s", "usual_s", "waits_s")}
    steps: dict[str, Any] = {name: number(record.get(name), least=0) for name in ("first_step", "last_step")}
    if kind not in KINDS or host is None or part not in PARTS or not ranks or not times["usual_s"]:
        return None
    if None in (*times.values(), *steps.values()):
        return None
    slow = Slowness(part=part, **times, **steps, deviations=real(record.get("deviations")) or 0.0)
    return Straggler(kind, rank_of(record.get("node")), host, number(record.get("gpu"), least=0), ranks, slow)


def last_metrics(run: RunDir) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the newest step row and evaluation row, {} for a missing one. Only the end of the file is read."""
    step: dict[str, Any] = {}
    evaluation: dict[str, Any] = {}
    for row in last_rows(run.metrics):
        if row.get("evaluation"):
            evaluation = evaluation or row
        else:
            return row, evaluation
    return step, evaluation


@dataclass(frozen=True)
class StepRate:
    """The median rate of an attempt's steps, and its quartiles: half of the steps are between `low` and `high`."""

    median: float
    low: float
    high: float
    steps: int

    def words(self, unit: str | None) -> tuple[str, str]:
        """Return the median with its unit, and the quartiles, as text."""
        return f"{_figure(self.median)} {unit or 'samples/s'}", f"{_figure(self.low)} to {_figure(self.high)}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def rate_of(steps: Iterable[tuple[float, float]]) -> float:
    """Return the rate over steps, each given by the units of its global batch and by its seconds. All views use this.

    The units come from the run's rows. Those of ranks cannot be added: every stage of a pipeline and every tensor rank
    records its whole batch.
    """
    units, seconds = map(sum, zip(*steps, strict=True))
    return units / seconds


def step_rate(run: RunDir) -> StepRate | None:
    """Summarise the steps of the newest attempt that has any, without its warm-up; return None before the first step.

    Evaluations, saves and the start are not part of a step. For a long attempt, only the newest steps are used.
    """
    steps = (row for row in last_rows(run.metrics) if not row.get("evaluation"))
    newest = next(steps, {})
    of_attempt = [newest, *takewhile(lambda row: row.get("attempt") == newest.get("attempt"), steps)]
    works = [(row["rate"], real(row.get("step_s")) or 1.0) for row in of_attempt if "rate" in row]
    rates = [rate_of([(rate * seconds, seconds)]) for rate, seconds in works]
    rates = rates[: len(rates) - min(WARM_UP_STEPS, len(rates) // 2)]  # the newest rates come first
    if not rates:
        return None
    low, median, high = statistics.quantiles(rates * 2 if len(rates) == 1 else rates, n=4, method="inclusive")
    return StepRate(median, low, high, len(rates))


def first_and_last_step(run: RunDir, attempt: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the first and the newest step row of rank 0 in an attempt; {} for a missing one."""
    path = run.attempt(attempt).metrics(0)
    return next(typed_lines(path), {}), next(last_rows(path), {})


def node_of_rank(run: RunDir, attempt: int) -> dict[int, int]:
    """Return the known nodes of an attempt's ranks, from its node files or else from `started` rows."""
    nodes: dict[int, int] = {}
    for row in typed_lines(run.events):
        if row.get("event") == "started" and row.get("attempt", 0) == attempt and "node" in row:
            nodes.update((rank, row["node"]) for rank, _ in row.get("ranks", ()))
    rank_of = below(MOST_RANKS)
    for path in run.attempt(attempt).path.glob("node-*.json"):
        record = read_json(path)
        node, entries = rank_of(record.get("node")), record.get("ranks")
        for entry in entries if isinstance(entries, list) else ():
            rank = rank_of(entry.get("rank")) if isinstance(entry, dict) else None
            if rank is not None and node is not None:
                nodes[rank] = node
    return nodes


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; return {} if the file is missing, incomplete or not an object."""
    try:
        value = reading.read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def last_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete rows in the last `TAIL_BYTES` of a JSON-lines file, newest first."""
    try:
        data = reading.read_end(path, TAIL_BYTES)
    except FileNotFoundError:
        return
    lines = data.split(b"\n")[:-1]
    for line in reversed(lines[1:] if len(data) == TAIL_BYTES else lines):
        if row := typed_line(line):
            yield row
