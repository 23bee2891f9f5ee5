"""The memory that ranks of a run recorded, and the memory that the formulas predict for them.

This module only reads, with one exception: to count a model from user code, it runs that code. It does so only if the
run belongs to the current user and the code has not changed since the run.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.errors import MusterError, NotFoundError, RefusedError
from muster.jobs.basics.files import read_lines
from muster.jobs.basics.reading import read_json
from muster.jobs.runfolder.memory_rows import AFTER, BASELINE, BEFORE, END, INIT, KINDS
from muster.jobs.runfolder.rundir import AttemptDir, RunDir
from muster.launch.common.fields import number, real, typed
from muster.launch.look.attempts import newest_with

if TYPE_CHECKING:
    from muster.collectives_bench.cost.memory import PeakMemory
    from muster.launch.bench.counting import OwnCode

MOST_ROWS: Final = 1000  # limit of rows read; a rank writes rows in its first steps only
POINTS: Final = (INIT, BEFORE, AFTER, END)
FACTS: Final = ("rank", "world_size", "attempt", "mode", "device", "host")


@dataclass(frozen=True)
class RankMemory:
    """One rank's memory in bytes, by kind and by point: the maxima over the first steps."""

    facts: Mapping[str, Any]
    held: Mapping[str, int]  # bytes of tensors by kind, in the recorded steps; at INIT if no step was recorded
    rest: int | None  # growth since the baseline, after the last recorded step; None if there is no such step
    peaks: Mapping[str, int]  # {one of POINTS: largest growth since the baseline until then}
    used: int | None  # CPUs only: peak of the heap in use, sampled when gradients arrive in the recorded steps
    reserved: int | None  # GPUs only: most memory reserved by the allocator
    steps: int  # number of recorded steps
    graphs: int | None = None  # GPUs only: memory that only recorded CUDA graphs use, at the end of the attempt

    @property
    def rank(self) -> int:
        """The global rank."""
        return int(self.facts["rank"])

    @property
    def peak(self) -> int:
        """The peak over the recorded steps; before the first one, the peak of building the model and optimizer."""
        return max((self.peaks[name] for name in (BEFORE, AFTER) if name in self.peaks), default=self.making)

    @property
    def making(self) -> int:
        """The peak while the model and the optimizer were built."""
        return self.peaks[INIT]

    def to_json(self) -> dict[str, Any]:
        """Return the record for --json."""
        own = {"held": dict(self.held), "rest": self.rest, "peaks": dict(self.peaks), "used": self.used}
        return {**self.facts, **own, "reserved": self.reserved, "graphs": self.graphs, "steps": self.steps}


@dataclass(frozen=True)
class MemoryCopies:
    """The newest copy of the state in the memory of the nodes: its step, and the bytes of the fullest node.

    `held`: with its own part and that of another node. `sent`: over the network, which took `seconds`.
    """

    step: int
    held: int
    sent: int
    seconds: float

    @classmethod
    def read(cls, run: RunDir) -> "MemoryCopies | None":
        """Read the newest copy from the untrusted events of a run; None if there is none."""
        found = None
        for row in read_lines(run.events):
            if row.get("event") == "copied":
                step, held, sent = (number(row.get(name), least=0) for name in ("step", "bytes", "sent"))
                seconds = real(row.get("seconds"))
                if not (step is None or held is None or sent is None or seconds is None):
                    found = cls(step, held, sent, seconds)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the record for --json."""
        return vars(self)


def read_memories(run: RunDir, attempt: int | None) -> tuple[int, list[RankMemory]]:
    """Read the memory records of an attempt, by default the newest with records; lowest rank first.

    Raises:
        NotFoundError: if there are no records.
    """
    return newest_with(
        run,
        attempt,
        lambda folder: [each for rank in folder.memory_ranks() if (each := read_rank(folder, rank)) is not None],
        "no rank has recorded its memory; ranks of train: jobs do so when they start",
    )


def read_rank(folder: AttemptDir, rank: int) -> RankMemory | None:
    """Read one rank's untrusted rows; return None if they are not a valid record."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    try:
        for row in islice(read_lines(folder.memory(rank)), MOST_ROWS):
            rows.setdefault(row["point"], []).append(row)
        (first, *_), (init, *_) = rows[BASELINE], rows[INIT]
        steps, facts = [*rows.get(BEFORE, ()), *rows.get(AFTER, ())], typed(first)
        if not facts["rank"] < facts["world_size"]:
            raise ValueError("the rank is not below the world size")
        return RankMemory(
            facts={name: facts[name] for name in FACTS},
            held={kind: max(_bytes(row["held"], kind) for row in (steps or [init])) for kind in KINDS},
            rest=_growth(rows[AFTER][-1], first, "now") if AFTER in rows else None,
            peaks={name: max(_growth(row, first, "peak") for row in rows[name]) for name in POINTS if name in rows},
            used=max((_bytes(row, "used") for row in steps if "used" in row), default=None),
            reserved=max(
                (_bytes(row["peak"], "reserved") for each in rows.values() for row in each if _has(row)), default=None
            ),
            steps=len(rows.get(AFTER, ())),
            graphs=max((_bytes(row, "graphs") for row in rows.get(END, ()) if "graphs" in row), default=None),
        )
    except (OSError, ValueError, KeyError, TypeError):  # damaged, or from another version
        return None


def own_code_of(run: RunDir, attempt: int) -> "OwnCode":
    """Count the model and optimizer of a run's user code, by running that code.

    Raises:
        RefusedError: if the run belongs to another user, or the code has changed since the run or fails.
        JobFileError, RunFolderError: if the run cannot be read.
    """
    from muster.jobs.spec.train import TrainSettings
    from muster.launch.bench import loads
    from muster.launch.bench.counting import OwnCode, own_code

    job = loads.train_job(str(run.job), ())
    assert isinstance(job.settings, TrainSettings)
    if not job.settings.makes:
        return OwnCode()
    if run.path.stat().st_uid != os.geteuid():
        raise RefusedError(
            "the run belongs to another user, whose code is not executed here; ask the owner to run muster memory"
        )
    record = read_json(run.attempt(attempt).code)
    for path, digest in record["files"].items():
        file = Path(record["workdir"], path)
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise RefusedError(f"{file} has changed since the run began, so its model cannot be counted")
    return own_code(job, job.settings, record["workdir"])


def formula_of(run: RunDir, memory: RankMemory, own: "OwnCode | None" = None) -> "PeakMemory | None":
    """Return the memory that the formulas predict for a rank of this run; None if its job cannot be read.

    `own` has the counts of the model and optimizer that user code builds, if the job names any.
    """
    from muster.collectives_bench.cost.memory import memories_of
    from muster.jobs.spec.train import TrainSettings
    from muster.launch.bench import loads
    from muster.launch.bench.own_split import own_split

    try:
        job = loads.train_job(str(run.job), ())
        assert isinstance(job.settings, TrainSettings)
        backend, ranks = "nccl" if memory.facts["device"] == "cuda" else "gloo", int(memory.facts["world_size"])
        every = memories_of(*own_split(job.settings, loads.load_of(job, ranks=ranks, backend=backend, own=own)))
    except (MusterError, KeyError):
        return None
    return None if every is None else every[memory.rank * len(every) // ranks]  # ranks of a stage are consecutive


def expected_peak(run: RunDir) -> float | None:
    """Return the predicted peak of the fullest rank in bytes; None if there is no record or no prediction."""
    try:
        (rank,) = fullest(read_memories(run, None)[1], 1)
    except NotFoundError:
        return None
    formula = formula_of(run, rank)
    return None if formula is None else formula.total


def fullest(memories: Iterable[RankMemory], count: int) -> list[RankMemory]:
    """Return the `count` ranks with the highest peaks, sorted by rank."""
    chosen = sorted(memories, key=lambda each: (-each.peak, each.rank))[:count]
    return sorted(chosen, key=lambda each: each.rank)


def _growth(row: Mapping[str, Any], first: Mapping[str, Any], kind: str) -> int:
    """Return the growth of a rank's memory from `first` to `row`; `kind` is "now" or "peak". In bytes.

    On a GPU this is allocated memory. On a CPU it is resident memory without file-backed pages (libraries). These pages
    are measured only for "now"; the peak is assumed to include the same number.
    """
    at, now, before = row[kind], row["now"], first["now"]
    if "allocated" in at:
        return _bytes(at, "allocated") - _bytes(before, "allocated")
    return _bytes(at, "rss") - _bytes(now, "files") - _bytes(before, "rss") + _bytes(before, "files")


def _bytes(values: Mapping[str, Any], name: str) -> int:
    """Return a size from a row, in bytes.

    Raises:
        ValueError: if the value is not a size.
    """
    if (size := number(values[name], least=0)) is None:
        raise ValueError(f"{name}: not a size")
    return size


def _has(row: Mapping[str, Any]) -> bool:
    return "reserved" in row.get("peak", {})
