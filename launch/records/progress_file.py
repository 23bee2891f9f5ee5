"""The file `progress.json`: every rank's progress, for readers that see only the run folder.

    {"time": 1763887000.1, "attempt": 1, "nodes": [{"node": 0, "host": "n0", "heard_s": 0.4,
     "ranks": [[3, "run", 41, 0.7, ""], ...]}, ...]}

A rank's row contains rank, phase, steps, seconds of silence (null: it never reports), process state and, if it has a
GPU, the GPU's utilization in percent and its memory in use in bytes.

The supervisor writes it at most once a second, and spends at most 2 % of its time on it.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from muster.jobs.basics.errors import StorageError
from muster.jobs.basics.files import mode_in, write_bytes
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common.fields import MOST_ATTEMPTS, MOST_RANKS, below, moment, number, real, text
from muster.launch.records.runrows import read_json
from muster.launch.wire.records import Progress

EVERY_S: Final = 1.0
SHARE: Final = 0.02
SUSPENDED: Final = ("T", "t")  # process states in proc(5): stopped by a signal, or by a debugger

_rank, _attempt = below(MOST_RANKS), below(MOST_ATTEMPTS)


class NodeSeen(Protocol):
    """A node as the supervisor knows it (`launch/supervision/run_nodes.py`); times are monotonic seconds."""

    heard: float
    progress: Progress | None
    ranks_at: float

    @property
    def host(self) -> str:
        """Its host."""


class ProgressFile:
    """The writer of the file, used by the supervisor."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._due = 0.0

    def write(self, attempt: int, nodes: Sequence[NodeSeen]) -> None:
        """Write the file, unless the last write is too recent. A temporarily full disk is ignored.

        Raises:
            RunFolderError: if it cannot be written.
        """
        now = time.monotonic()
        if now < self._due:
            return
        told = [_node(number, node, now) for number, node in enumerate(nodes)]
        record = {"time": time.time(), "attempt": attempt, "nodes": told}
        try:
            data = json.dumps(record, separators=(",", ":")).encode()
            write_bytes(self.run.progress, data, mode=mode_in(self.run.path))
        except StorageError:
            pass  # a lasting failure is reported when events are written
        done = time.monotonic()
        self._due = now + max(EVERY_S, (done - now) / SHARE)

    def remove(self) -> None:
        """Remove the file, because the run is over."""
        self.run.progress.unlink(missing_ok=True)


def _node(place: int, node: NodeSeen, now: float) -> dict[str, Any]:
    rows: list[list[Any]] = []
    if (told := node.progress) is not None:
        since_s, wrote_s = now - node.ranks_at, told["output_age_s"]
        for rank, each in told["ranks"].items():
            # a program without a session: only the time of its last output is known
            age_s = each["beats_age_s"] if told["sessions"] else wrote_s
            silent_s = None if age_s is None else round(age_s + since_s, 1)
            phase = each["phase"] if told["sessions"] else "run"
            if rank.isdecimal():  # a node may send any text here
                rows.append([int(rank), phase, each["steps"], silent_s, each["state"], *each.get("gpu", ())])
    return {"node": place, "host": node.host, "heard_s": round(now - node.heard, 1), "ranks": rows}


@dataclass(frozen=True)
class ReportedProgress:
    """The progress of a rank, and the seconds since it last made any."""

    phase: str
    steps: int
    silent_s: float | None  # None if its program reports nothing
    suspended: bool  # its process is stopped, by SIGSTOP or a debugger
    gpu_percent: int | None = None  # utilization of its GPU
    gpu_bytes: int | None = None  # memory of its GPU in use


@dataclass(frozen=True)
class RunProgress:
    """The file's content, for one attempt. `heard_s`: seconds since each node's agent was last heard, when written."""

    attempt: int
    heard_s: Mapping[int, float]
    ranks: Mapping[int, ReportedProgress]


def read_progress(run: RunDir) -> RunProgress | None:
    """Read the file, or return None if there is none. Silence is counted up to now. Malformed rows are dropped."""
    record = read_json(run.progress)
    written, attempt = moment(record.get("time")), _attempt(record.get("attempt"))
    nodes = record.get("nodes")
    if written is None or attempt is None or not isinstance(nodes, list):
        return None
    since_s = max(0.0, time.time() - written)  # this host's clock may differ from the writer's by seconds
    heard: dict[int, float] = {}
    ranks: dict[int, ReportedProgress] = {}
    for node in nodes:
        if not isinstance(node, dict):
            continue
        place, heard_s, rows = _rank(node.get("node")), real(node.get("heard_s")), node.get("ranks")
        if place is not None and heard_s is not None:
            heard[place] = heard_s
        for row in rows if isinstance(rows, list) else ():
            if not isinstance(row, list) or len(row) not in (5, 7):
                continue
            rank, phase, steps, silent_s, state = _rank(row[0]), text(row[1]), number(row[2]), real(row[3]), row[4]
            gpu = (number(row[5], 100, 0), number(row[6], least=0)) if len(row) == 7 else (None, None)
            if rank is not None and phase is not None and steps is not None:
                silent_s = None if silent_s is None else silent_s + since_s
                ranks[rank] = ReportedProgress(phase, steps, silent_s, state in SUSPENDED, *gpu)
    return RunProgress(attempt, heard, ranks)
