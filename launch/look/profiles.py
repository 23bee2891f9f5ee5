"""Readers of the profiles in a run folder, combined with the phase times from the ranks' metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from muster.jobs.basics.files import read_lines
from muster.jobs.basics.reading import read_json
from muster.jobs.runfolder.profiledir import ProfileDir
from muster.jobs.runfolder.rundir import AttemptDir, RunDir
from muster.launch.common.fields import (
    MOST_RANKS,
    below,
    fits,
    list_of,
    number,
    optional,
    pair,
    real,
    reals,
    text,
    texts,
)
from muster.launch.look.attempts import newest_with

PHASES: Final = ("data", "forward", "backward", "communication", "optimizer", "replay")
WAITING: Final = "communication"
_STEP: Final = {
    "step": number,
    "seconds": real,
    "communication_s": real,
    "hidden_s": real,
    "device_s?": optional(real),
    "overlap": optional(real),
}
_TIMES: Final = ("cpu_total_us", "cpu_self_us", "cuda_total_us", "cuda_self_us")
_OPERATOR: Final = {"name": text, "kind": text, "calls": number, **dict.fromkeys(_TIMES, real)}
SHAPE: Final = {
    "rank": below(MOST_RANKS),
    "world_size": below(MOST_RANKS + 1, 1),
    "steps": [_STEP],
    "steps_of_job": number,
    "mode": text,
    "device": text,
    "host": text,
    "files?": texts,
    "memory?": reals,
    "operators": [_OPERATOR],
    "kernels": [_OPERATOR],
    "kinds": reals,
    "phases": reals,
    "device_phases?": optional(reals),
    "overlap": optional(real),
    "matmul_share": optional(real),
}
MOST_POINTS: Final = 2000
MOST_ALLOCATIONS: Final = 20
MOST_FRAMES: Final = 5000
_ALLOCATION: Final = {"bytes": number, "operator": text, "module": text, "step": number, "alive_s": real}
LATER: Final[Mapping[str, Any]] = {  # optional keys, missing in profiles of older runs; a damaged one is dropped
    # Seconds by kind of module over the recorded steps, forward and backward; on a GPU, time of kernels.
    "modules": reals,
    "modules_note": text,  # why "modules" is missing
    "memory_over_time": list_of(pair, MOST_POINTS),  # [seconds since the first recorded step began, bytes of tensors]
    "allocations": list_of(
        _ALLOCATION, MOST_ALLOCATIONS
    ),  # storages alive at the peak, largest first; step 0: allocated before the recorded steps
}


class FlameFrame(NamedTuple):
    """One frame of a flame graph. Parents come before children; a child starts at `start_us`, within its parent."""

    depth: int  # the depth of the root is 0
    name: str  # an operator or a module; the user chose the name, so it must be escaped
    kind: str
    start_us: float
    us: float
    calls: int


@dataclass(frozen=True)
class RankProfile:
    """One rank's profile: its record, and from its metrics the mean seconds by phase of a recorded step."""

    folder: Path
    record: Mapping[str, Any]
    breakdown: Mapping[str, float]
    left_out: tuple[str, ...] = ()  # keys of the record that are damaged

    @property
    def rank(self) -> int:
        """The global rank."""
        return int(self.record["rank"])

    @property
    def step_s(self) -> float:
        """Mean seconds of a recorded step."""
        return sum(self.breakdown.values())

    @property
    def own_s(self) -> float:
        """Mean seconds of a recorded step, without exposed communication, which may include waiting for ranks."""
        return sum(seconds for phase, seconds in self.breakdown.items() if phase != WAITING)

    def to_json(self) -> dict[str, Any]:
        """Return the record for --json."""
        own = {"breakdown": dict(self.breakdown), "own_s": self.own_s, "left_out": self.left_out}
        return {**self.record, "path": str(self.folder), **own}


def read_profiles(run: RunDir, attempt: int | None) -> tuple[int, list[RankProfile]]:
    """Read the profiles of an attempt, by default the newest with profiles; the slowest rank comes first.

    Raises:
        NotFoundError: if there are no profiles.
    """
    attempt, found = newest_with(
        run,
        attempt,
        lambda folder: [each for rank in folder.profiled_ranks() if (each := _read(folder, rank)) is not None],
        "no rank has written a profile; set train.profile: true (muster run JOB --set train.profile=true), and wait "
        "until the recorded steps are done",
    )
    return attempt, sorted(found, key=lambda each: (-each.own_s, each.rank))


def _read(folder: AttemptDir, rank: int) -> RankProfile | None:
    paths = folder.profile(rank)
    try:
        record = read_json(paths.record)
        if not fits(record, SHAPE):
            return None
        left_out = tuple(key for key, shape in LATER.items() if key in record and not fits(record[key], shape))
        record = {key: value for key, value in record.items() if key not in left_out}
        steps = {int(step["step"]) for step in record["steps"]}
        rows = [row for row in read_lines(folder.metrics(rank)) if row.get("step") in steps and row.get("profile")]
        return RankProfile(paths.path, record, breakdown_of(rows) or _of_trace(record), left_out)
    except (OSError, ValueError, KeyError, TypeError):  # damaged, or from another version
        return None


def read_flame(profile: RankProfile, *, device: bool = False) -> tuple[FlameFrame, ...]:
    """Read the flame graph of a rank's host threads, or of its GPU; return () if it is missing or damaged.

    The file has rows [depth, name, kind, microseconds, calls] in the order of drawing.
    """
    paths = ProfileDir(profile.folder)
    try:
        rows = read_json(paths.cuda_flame_data if device else paths.flame_data)["frames"]
        frames: list[FlameFrame] = []
        ends: list[float] = []  # at index d: where the next frame of depth d starts
        for depth, name, kind, us, calls in rows[:MOST_FRAMES]:
            read = (below(len(ends) or 1)(depth), text(name), text(kind), real(us), number(calls, least=0))
            if None in read or us < 0.0 or (depth == 0) != (not frames):
                return ()
            start_us = ends[depth] if frames else 0.0
            us = (
                min(us, ends[depth - 1] - start_us) if frames else us
            )  # rounding may make children wider than their parent
            frames.append(FlameFrame(depth, text(name) or "", text(kind) or "", start_us, us, calls))
            ends[depth:] = [start_us + us, start_us]
        return tuple(frames)
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def breakdown_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean seconds by phase over rows of metrics; {} without rows."""
    sums = {phase: sum(real(row.get(f"{phase}_s")) or 0.0 for row in rows) for phase in PHASES}
    return {phase: total / len(rows) for phase, total in sums.items() if rows and (total > 0.0 or phase != "replay")}


def _of_trace(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the phase times from the trace, for ranks whose metrics are missing on this machine."""
    steps = max(1, len(record["steps"]))
    return {phase: float(seconds) / steps for phase, seconds in record["phases"].items()}
