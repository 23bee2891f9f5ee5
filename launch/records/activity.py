"""A few words on what a run is doing now, and its newest checkpoint, derived from its rows and file names."""

from dataclasses import dataclass
from typing import Any

from muster.jobs.checkpoint.names import step_and_attempt
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.records.runrows import Rows


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest committed checkpoint. `time`: when it was committed, in Unix seconds by the file system's clock."""

    name: str
    step: int
    attempt: int
    time: float


def newest_saved(run: RunDir) -> NewestCheckpoint | None:
    """Return the newest committed checkpoint, judged by its name. Its content is not read, so it may be damaged."""
    found = []
    for entry in run.checkpoints.glob("step-*"):
        named = step_and_attempt(entry.name)
        try:
            committed = CheckpointDir(entry).manifest.lstat().st_mtime
        except OSError:  # the checkpoint is not committed, or was deleted meanwhile
            continue
        if named is not None:
            step, attempt = named
            found.append(NewestCheckpoint(entry.name, step, attempt, committed))
    return max(found, key=lambda each: (each.attempt, each.step), default=None)


def left_out(rows: Rows) -> tuple[str, ...]:
    """List the hosts that this supervisor's earlier attempts used and the newest attempt does not."""
    now = set(rows.hosts if rows.restarting is None else rows.restarting.get("hosts", ()))
    return tuple(host for host in rows.all_hosts if now and host not in now)


def doing(rows: Rows, now: float) -> str | None:
    """Describe what a run in progress is doing; None if it simply trains. `now`: Unix seconds."""
    told = rows.told
    if rows.restarting is not None:
        return _restart(rows.restarting, now)
    if "draining" in told:
        limit_s = told["draining"].get("deadline_s")
        within = "" if limit_s is None else f", within {limit_s:g} s"
        return f"saving, then stopping{within}: {told['draining'].get('by')}"
    if "hang" in told and told["hang"].get("phase") != "output":
        return f"no progress for {told['hang'].get('seconds', 0.0):.0f} s; asking every rank for its stacks"
    if "resuming" in told and "first_step" not in told:
        name, step = told["resuming"].get("checkpoint"), told["resuming"].get("step")
        if "loaded" in told:
            return f"about to continue after step {step}"
        return f"loading {name}" if rows.joined else f"starting, to continue from {name}"
    missed, saved = told.get("missed"), told.get("saved", {})
    if missed is not None and missed.get("time", 0.0) > saved.get("time", 0.0):
        return f"training continues, but the save of step {missed.get('step')} failed: {missed.get('message')}"
    return None


def _restart(row: dict[str, Any], now: float) -> str:
    left_s = row.get("time", now) + row.get("delay_s", 0.0) - now
    hosts = list(dict.fromkeys(row.get("hosts", ())))
    where = f" on {', '.join(hosts)}" if hosts else ""
    when = f"in {left_s:.1f} s" if left_s > 0.05 else "begins"
    return f"attempt {row.get('attempt')} {when}{where}: {row.get('why')}"
