"""Write the run folder of a job without an agent: rank 0 creates the attempt and records the main events."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, Final

from muster.jobs.basics import exits
from muster.jobs.basics.errors import MusterError
from muster.jobs.basics.files import append_line, write_json
from muster.jobs.hosts.placement import NodePlacement, Placement
from muster.jobs.hosts.ranks import RankEnv
from muster.jobs.machine import procfs
from muster.jobs.runfolder.rundir import RunDir

FAILED: Final = 1


def begin(
    run: RunDir,
    env: RankEnv,
    hosts: Sequence[str],
    began: float,
    came_from: Mapping[str, Any] | None = None,
    **submitted: Any,
) -> int:
    """Create the next attempt of a run, write its first events, and return its number.

    Args:
        hosts: the host of every rank.
        began: the time at which the run began (unix seconds).
        came_from: the checkpoint that the attempt resumes from, as `checkpoint` (its name) and `step`.
        submitted: more fields of the event `submitted`.

    Raises:
        RunFolderError, StorageError: if the folder cannot be written.
    """
    attempt = max(run.attempt_numbers(), default=-1) + 1
    folder = run.attempt(attempt)
    folder.make()
    placement = placement_of(env, hosts)
    write_json(folder.placement, placement.to_json())
    source = {name: (came_from or {}).get(name, other) for name, other in (("checkpoint", None), ("step", 0))}
    write_json(folder.resume, source)
    facts = {
        "run_id": run.run_id,
        "nodes": len(placement.nodes),
        "world_size": env.world_size,
        "transport": "direct",
        "host": hosts[0],
        "pid": os.getpid(),
        "pid_start": procfs.start_ticks(os.getpid()),
        **submitted,
    }
    append_line(run.events, {"time": began, "event": "submitted", **facts})
    where = {"world_size": env.world_size, "master_addr": env.master_addr, "master_port": env.master_port}
    event(run, "attempt", {"attempt": attempt, **where})
    if came_from is not None:
        event(run, "resuming", {"attempt": attempt, **source})
    print(f"run {run.path}", flush=True)
    return attempt


def placement_of(env: RankEnv, hosts: Sequence[str]) -> Placement:
    """Return the placement of the ranks. A node is a block of ranks on one host; pretend nodes share a host."""
    each = env.local_world_size
    even = env.nodes * each == env.world_size
    nodes: list[NodePlacement] = []
    for (_, host), group in groupby(range(env.world_size), key=lambda rank: (rank // each if even else 0, hosts[rank])):
        block = list(group)
        address = env.master_addr if not nodes else host
        nodes.append(NodePlacement(len(nodes), host, address, block[0], len(block)))
    return Placement(tuple(nodes), env.world_size, env.master_addr)


def record(run: RunDir, attempt: int, work: Callable[[], int]) -> int:
    """Run rank 0's work and record how it ended. Without an agent, nothing is known about the other ranks."""
    began = time.time()
    code, message = exits.DONE, "done"
    try:
        code = work()
        message = exits.class_of(code)
        return code
    except BaseException as error:
        code, message = ending_of(error)
        raise
    finally:
        write_end(run, attempt, began, code, message)


def write_end(run: RunDir, attempt: int, began: float, code: int, message: str) -> None:
    """Record the end of an attempt that began at `began` (unix seconds)."""
    verdict = {"code": code, "class": exits.class_of(code), "message": message}
    row = {"attempt": attempt, "started": began, "ended": time.time(), **verdict}
    try:
        append_line(run.attempts, {**row, "next_step": "", "first": None, "victims": []})
        event(run, "ended", {"attempt": attempt, **verdict})
    except MusterError as error:
        with suppress(OSError):  # standard error may be on the same full disk
            print(f"muster: the end of the run was not recorded: {error}", file=sys.stderr, flush=True)


def event(run: RunDir, name: str, values: Mapping[str, Any]) -> None:
    """Append one event."""
    append_line(run.events, {"time": time.time(), "event": name, **values})


def ending_of(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the message for the exception that ended rank 0."""
    if isinstance(error, MusterError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return exits.STOPPED, "stopped by the user"
    if isinstance(error, SystemExit):
        code, _ = exits.of_system_exit(error.code)
        return code, f"rank 0 ended with exit code {code}" if code else "done"
    return FAILED, f"rank 0: {type(error).__name__}: {error}"
