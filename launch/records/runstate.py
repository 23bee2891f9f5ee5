"""The state of a run, read from its folder as one frozen record of the newest attempt. Nothing is written.

    events.jsonl   submitted … attempt … joined … stopping … attempt_ended … restarting … attempt … joined … ended
    state          starting ───────────→ running → stopping ───────────────→ restarting ──→ starting → running   done |
                                                                                                     stopped | failed

A run without an `ended` row is `lost` if its supervisor is gone. On this host, the supervisor is gone if no process has
the pid and the start time of the `submitted` row. On another host, the lease decides, which the supervisor renews every
two seconds. A run with a fresh lease is alive; a run whose lease is older than two minutes is lost. In between, the
clocks may differ, so the state is marked as uncertain ("lost?"), as it is without a lease ("running?"). For a run in
Slurm's queue, Slurm is asked (`launch/records/slurm_job.py`).
"""

import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from muster.jobs.basics import exits
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import processes
from muster.launch.records import lease
from muster.launch.records.activity import NewestCheckpoint, doing, left_out, newest_saved
from muster.launch.records.runrows import Rows, StepRate, last_metrics, read_rows, read_stragglers, step_rate
from muster.launch.records.stragglers import Straggler

if TYPE_CHECKING:
    from muster.launch.records.slurm_job import SlurmFacts

State = Literal["starting", "running", "restarting", "stopping", "done", "failed", "stopped", "lost"]
RankPhase = Literal["waiting", "running", "done", "failed", "victim", "stopped", "unknown"]

OVER: Final[frozenset[State]] = frozenset({"done", "failed", "stopped", "lost"})
DIRECT: Final = "direct"
STOPPED_CLASSES: Final = (exits.class_of(exits.STOPPED), exits.class_of(exits.REQUEUE))
PHASE_OF_CAUSE: Final[dict[str, RankPhase]] = {
    "done": "done",
    "own": "failed",
    "peer": "victim",
    "stopped": "stopped",
    "tolerated": "failed",  # in mode asynchronous of version 0.1.0, whose other ranks went on
}


@dataclass(frozen=True)
class RankState:
    """One rank of the newest attempt. `host` and `pid` are None until it has been started."""

    rank: int
    node: int | None
    host: str | None
    pid: int | None
    state: RankPhase
    code: int | None = None
    signal: str | None = None


@dataclass(frozen=True)
class RunState:
    """The state of a run at one moment. Unknown values are None. Times are Unix seconds; `rate` is in `unit`."""

    run_id: str
    path: str
    state: State
    sure: bool
    name: str
    kind: str | None
    transport: str | None
    host: str | None
    pid: int | None
    pid_start: int | None
    grace_s: float
    nodes: int | None
    world_size: int | None
    started: float | None
    ended: float | None
    seconds: float | None
    attempt: int | None
    restarts: int
    doing: str | None
    checkpoint: NewestCheckpoint | None
    left_out: tuple[str, ...]
    heard_s: float | None  # seconds since a supervisor on another host last renewed its lease
    code: int | None
    class_name: str | None
    message: str | None
    step: int | None
    steps: int | None
    epoch: int | None
    loss: float | None
    rate: StepRate | None
    unit: str | None
    ranks: tuple[RankState, ...]
    stragglers: tuple[Straggler, ...]  # as the supervisor last named them
    warnings: tuple[str, ...]
    continue_with: str  # the command that continues a run that Muster did not start; "" if muster resume does

    @property
    def label(self) -> str:
        """The state for display, with a question mark if it cannot be determined from here."""
        return self.state if self.sure else f"{self.state}?"

    @property
    def is_over(self) -> bool:
        """True if the run will write nothing more. A run marked `lost?` may still be alive."""
        return self.state in OVER and (self.sure or self.state != "lost")

    def to_json(self) -> dict[str, Any]:
        """Return the record for --json. `class_name` is renamed to `class`, as in the rows; `rate` is the median."""
        record = asdict(self)
        rate = record["rate"] or dict.fromkeys(("median", "low", "high", "steps"))
        record |= {"rate": rate.pop("median"), **{f"rate_{name}": value for name, value in rate.items()}}
        return {"class" if key == "class_name" else key: value for key, value in record.items()}

    @property
    def progress(self) -> str | None:
        """The progress as text: `20`, or `20 of 196` if the end is known; None before the first step."""
        if self.step is None:
            return None
        return str(self.step) if self.steps is None else f"{self.step} of {self.steps}"

    @property
    def outcome(self) -> str | None:
        """How the run ended: its class and, if nonzero, its code; None while it is in progress."""
        if self.class_name is None:
            return None
        return self.class_name if not self.code else f"{self.class_name} ({self.code})"


def read_state(run: RunDir, read: Callable[[RunDir], Rows] = read_rows) -> RunState:
    """Read a run folder. Values missing in an incomplete folder, or in that of a direct run, are None."""
    rows = read(run)
    seen = _ask_slurm(run, rows)
    alive = _supervisor_lives(run, rows.submitted) if seen is None else seen.alive
    if alive is False and rows.ended is None:
        # Between our two reads, the supervisor may have written its last row and ended.
        rows = read(run)
    # if the job is queued again, its last row belongs to an earlier allocation
    if seen is not None and (seen.waits or rows.ended is None):
        rows.ended = seen.ended
    step_row, _ = last_metrics(run)
    attempt = rows.attempt.get("attempt")
    # a direct run has no `attempt` row
    of_now = not rows.attempts if attempt is None else step_row.get("attempt", 0) == attempt
    waits = seen is not None and seen.waits and rows.ended is None
    heard_s = None if is_here(rows.submitted.get("host")) else lease.age_s(run)
    gone = False if alive is None and seen is None and heard_s is not None else alive
    has_steps = bool(step_row) and of_now
    state = "starting" if waits else _state(rows, gone, stop_asked=run.stop.exists(), has_steps=has_steps)
    submitted, ended, now = rows.submitted, rows.ended or {}, time.time()
    started, ended_s = submitted.get("time"), ended.get("time")
    until = ended_s if ended_s is not None else rows.last_time if state == "lost" else now
    return RunState(
        run_id=run.run_id,
        path=str(run.path),
        state=state,
        sure=rows.ended is not None or alive is not None,
        name=str(submitted.get("name") or run.run_id.rsplit("-", 2)[0]),
        kind=submitted.get("kind"),
        transport=submitted.get("transport"),
        host=submitted.get("host"),
        pid=submitted.get("pid"),
        pid_start=submitted.get("pid_start"),
        grace_s=submitted.get("grace_s") or 5.0,
        nodes=len(rows.hosts) or submitted.get("nodes"),
        world_size=rows.attempt.get("world_size", submitted.get("world_size")),
        started=started,
        ended=ended_s,
        seconds=None if started is None or until is None else max(0.0, until - started),
        attempt=attempt,
        restarts=max(0, rows.attempts - 1),
        doing=None if state in OVER or waits else doing(rows, now),
        checkpoint=newest_saved(run),
        left_out=() if state in OVER else left_out(rows),
        heard_s=heard_s,
        code=ended.get("code"),
        class_name=ended.get("class"),
        message=ended.get("message") or (seen.message if seen is not None else None),
        step=step_row.get("step"),
        steps=step_row.get("steps"),
        epoch=step_row.get("epoch"),
        loss=step_row.get("loss"),
        rate=step_rate(run),
        unit=step_row.get("unit"),
        ranks=_ranks(rows, over=state in OVER),
        stragglers=read_stragglers(rows.told.get("slow", {}).get("stragglers")),
        warnings=tuple(rows.warnings),
        continue_with=submitted.get("continue_with") or "",
    )


def is_here(host: str | None) -> bool:
    """Return whether a host name means this host; domains are ignored."""
    return host is not None and host.partition(".")[0] == socket.gethostname().partition(".")[0]


def _state(rows: Rows, alive: bool | None, *, stop_asked: bool, has_steps: bool) -> State:
    if rows.ended is not None:
        name = rows.ended.get("class") or exits.class_of(rows.ended.get("code") or 0)
        return "done" if name == "done" else "stopped" if name in STOPPED_CLASSES else "failed"
    if alive is False:
        return "lost"
    if rows.restarting is not None and not stop_asked:
        return "restarting"
    if rows.stopping or stop_asked or "draining" in rows.told:
        return "stopping"
    # A command need not report that its ranks have joined, so it counts as running once they have started.
    told = {rank for row in rows.started for rank, _ in row.get("ranks", ())}
    all_started = rows.submitted.get("kind") == "command" and len(told) >= (rows.attempt.get("world_size") or 1)
    return "running" if rows.joined or all_started or has_steps else "starting"


def _ask_slurm(run: RunDir, rows: Rows) -> "SlurmFacts | None":
    final = rows.ended is not None and rows.ended.get("code") not in (exits.STOPPED, exits.REQUEUE)
    if final or not run.slurm.exists():
        return None
    # imported here, because only Slurm runs need it
    from muster.launch.records.slurm_job import see

    return see(run, rows)


def _supervisor_lives(run: RunDir, submitted: dict[str, Any]) -> bool | None:
    """Return whether the supervisor is alive; None if that cannot be known from this host.

    For a supervisor on another host, the lease decides: alive if it is fresh, gone if it is so old that a difference of
    clocks cannot explain its age.
    """
    pid, ticks = submitted.get("pid"), submitted.get("pid_start")
    if pid is None or not is_here(submitted.get("host")):
        age = lease.age_s(run)
        return None if age is None else True if age < lease.STALE_S else False if age > lease.DEAD_S else None
    if ticks is not None:
        return processes.is_same(pid, ticks)
    return None if processes.start_ticks(pid) is not None else False


def _ranks(rows: Rows, *, over: bool) -> tuple[RankState, ...]:
    world_size = rows.attempt.get("world_size", rows.submitted.get("world_size")) or 0
    where: dict[int, tuple[int | None, str | None, int | None]] = {}
    for row in rows.started:
        where.update((rank, (row.get("node"), row.get("host"), pid)) for rank, pid in row.get("ranks", ()))
    exited = {row["rank"]: row for row in rows.exited if "rank" in row}  # a row without a rank is about a whole node
    states = []
    for rank in sorted({*range(world_size), *where, *exited}):
        exit_row = exited.get(rank, {})
        node, host, pid = where.get(rank, (exit_row.get("node"), exit_row.get("host"), None))
        phase: RankPhase = "unknown" if over else "running" if rank in where else "waiting"
        if exit_row:
            phase = PHASE_OF_CAUSE.get(exit_row.get("cause", ""), "unknown")
        states.append(RankState(rank, node, host, pid, phase, exit_row.get("code"), exit_row.get("signal")))
    return tuple(states)
