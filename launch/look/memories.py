"""What the ranks of a run have said of their memory, beside what the formulas say.

It only reads, with one exception: a model that a user's file makes is built to be counted. That file is run only if the
run is the user's own and the file has not changed since.
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
from muster.launch.common.fields import number, typed
from muster.launch.look.attempts import newest_with

if TYPE_CHECKING:
    from muster.collectives_bench.cost.memory import Memory
    from muster.launch.bench.counting import OwnCode

MOST_ROWS: Final = 1000  # a rank writes them in its first steps only
POINTS: Final = (INIT, BEFORE, AFTER, END)
FACTS: Final = ("rank", "world_size", "attempt", "mode", "device", "host")


@dataclass(frozen=True)
class RankMemory:
    """One rank's record: bytes by kind and by point, the greatest of the first steps."""

    facts: Mapping[str, Any]
    held: Mapping[str, int]  # of a step, by kind; of init before there was one
    rest: int | None  # by how much its memory had grown after the last of these; None before a step
    peaks: Mapping[str, int]  # by how much it grew at most: until init, until before_step, after_step and end
    used: int | None  # on CPUs, the most of its heap that was in use when gradients came, of the first steps
    reserved: int | None  # the most that a GPU's allocator had taken
    steps: int  # how many were looked at

    @property
    def rank(self) -> int:
        """Its rank."""
        return int(self.facts["rank"])

    @property
    def peak(self) -> int:
        """The most of the steps that were looked at; until there was one, of what comes before."""
        return max((self.peaks[name] for name in (BEFORE, AFTER) if name in self.peaks), default=self.making)

    @property
    def making(self) -> int:
        """The most until there were model and optimizer."""
        return self.peaks[INIT]

    def to_json(self) -> dict[str, Any]:
        """Return the record for --json."""
        own = {"held": dict(self.held), "rest": self.rest, "peaks": dict(self.peaks), "used": self.used}
        return {**self.facts, **own, "reserved": self.reserved, "steps": self.steps}


def read_memories(run: RunDir, attempt: int | None) -> tuple[int, list[RankMemory]]:
    """Read what the ranks of an attempt said, by default of the newest in which any did; lowest rank first.

    Raises:
        NotFoundError: none did.
    """
    return newest_with(
        run,
        attempt,
        lambda folder: [each for rank in folder.memory_ranks() if (each := read_rank(folder, rank)) is not None],
        "no rank has said what its memory is for; ranks of train: jobs do, once they begin",
    )


def read_rank(folder: AttemptDir, rank: int) -> RankMemory | None:
    """Read one rank's rows; None where they do not make a record: nothing read here is trusted."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    try:
        for row in islice(read_lines(folder.memory(rank)), MOST_ROWS):
            rows.setdefault(row["point"], []).append(row)
        (first, *_), (init, *_) = rows[BASELINE], rows[INIT]
        steps, facts = [*rows.get(BEFORE, ()), *rows.get(AFTER, ())], typed(first)
        if not facts["rank"] < facts["world_size"]:
            raise ValueError("a rank that its world does not have")
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
        )
    except (OSError, ValueError, KeyError, TypeError):  # torn, or another version's
        return None


def own_code_of(run: RunDir, attempt: int) -> "OwnCode":
    """Count what the user's code of a run makes, by calling it: only where it is what the run's ranks imported.

    Raises:
        RefusedError: the run is another user's, the code has changed since, or it fails.
        JobFileError, RunFolderError: the run cannot be read.
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
            "the run belongs to another user, whose code is not executed here; its owner can call muster memory"
        )
    record = read_json(run.attempt(attempt).code)
    for path, digest in record["files"].items():
        file = Path(record["workdir"], path)
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise RefusedError(f"{file} has changed since the run began, so its model cannot be counted")
    return own_code(job, job.settings, record["workdir"])


def formula_of(run: RunDir, memory: RankMemory, own: "OwnCode | None" = None) -> "Memory | None":
    """Return what the formulas say of a rank of this run; None where its job cannot be read.

    `own` is what the user's code makes, if the job names any.
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
    return None if every is None else every[memory.rank * len(every) // ranks]  # ranks of a stage are neighbours


def expected_peak(run: RunDir) -> float | None:
    """Return what the formulas say of the fullest rank's peak; None where there is no record or no formula."""
    try:
        (rank,) = fullest(read_memories(run, None)[1], 1)
    except NotFoundError:
        return None
    formula = formula_of(run, rank)
    return None if formula is None else formula.total


def fullest(memories: Iterable[RankMemory], count: int) -> list[RankMemory]:
    """Return so many of the ranks with the highest peaks, by rank."""
    chosen = sorted(memories, key=lambda each: (-each.peak, each.rank))[:count]
    return sorted(chosen, key=lambda each: each.rank)


def _growth(row: Mapping[str, Any], first: Mapping[str, Any], kind: str) -> int:
    """Return by how much a rank's own memory had grown at a row, "now" or at its "peak".

    It is the allocator's, or RAM without the pages of libraries, of which there are as many at the peak as after it.
    """
    at, now, before = row[kind], row["now"], first["now"]
    if "allocated" in at:
        return _bytes(at, "allocated") - _bytes(before, "allocated")
    return _bytes(at, "rss") - _bytes(now, "files") - _bytes(before, "rss") + _bytes(before, "files")


def _bytes(values: Mapping[str, Any], name: str) -> int:
    """Return a size of a row.

    Raises:
        ValueError: it is none.
    """
    if (size := number(values[name], least=0)) is None:
        raise ValueError(f"{name}: not a size")
    return size


def _has(row: Mapping[str, Any]) -> bool:
    return "reserved" in row.get("peak", {})
