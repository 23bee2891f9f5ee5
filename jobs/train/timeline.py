"""Record the work of all ranks in the steps at log points, as rows of `attempt-NNN/timeline.jsonl`.

    {"step": 20, "rank_of": [1, 3], "records": [[rank, kind, number, of, start_s, end_s], ...],    in every row
     "schedule": "1f1b", "microbatches": 8, "chunks": 1, "slices": 1, "collectives": [...]}   of one pipeline
     "mode": "bucketed", "timed_by": "host", "apart_s": 2e-05, "not_timed": ""}           of data-parallel ranks

A pipeline's record is an action or a message: `number` is its stage, `of` its micro-batch, and `rank_of` has the rank
of every stage. Its collectives average gradients over pipelines. They are recorded on CPUs only, because on GPUs a
pipeline's times are the host's. A data-parallel rank's record is a phase of its clock (`of` is null, `communication` is
the exposed wait) or a collective. A collective's `number` is its place in order of launch, and `of` its bytes; it ends
at the log point if it has not finished then.
`rank_of` then lists the ranks, `apart_s` is the uncertainty of their clock offsets, and `not_timed` is the reason if
collectives are missing.

Ranks are those of the world. Times count from the first record of the step, on the clock of the row's first rank. A
record takes about 45 bytes. A pipeline rank has about six records per micro-batch. A data-parallel rank has five, and
one for each collective. The first 32 log points are all recorded, then every second one up to 64, every fourth up to
128, and so on.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final

from muster.ddp.checks import device_of, gather_json
from muster.ddp.collective_log import LOG
from muster.ddp.means import thread_of
from muster.jobs.basics.errors import MusterError
from muster.jobs.basics.files import append_line
from muster.jobs.basics.terminal import warn
from muster.jobs.train.parallel.stages import Stages
from muster.jobs.train.profiling.clock import StepMarks
from muster.jobs.world.world import World
from muster.pipe.mesh import Mesh
from muster.pipe.schedules.actions import Schedule
from muster.pipe.schedules.draw import COMPUTE
from muster.pipe.schedules.measured import Record
from muster.pipe.timeline import Offset, clock_offsets, offsets_by_meetings, on_one_clock, records_of

DIGITS: Final = 7  # number of decimals of seconds: a resolution of 0.1 us
COMPARED: Final = 10  # number of records between two comparisons of clocks, which drift by 10 us per second or more
KINDS: Final = (*COMPUTE, "send", "wait")  # of a pipeline's actions and messages
DENSE_BITS: Final = 5  # the first 2**5 log points are all recorded

RankRecords = tuple[
    list[Record], list[Offset]
]  # a rank's records, and the clock offsets if it is a pipeline's first rank
Span = tuple[str, int, int | None, float, float]  # kind, number, bytes, start and end


class NotRecording:
    """The timeline interface of the training loop; this class records nothing."""

    def expect(self, log_point: bool) -> None:
        """Prepare for the next step. `log_point`, the same on every rank, is True if a log point follows the step."""

    def record(self, step: int) -> None:
        """Record the last step: a collective."""


class TimelineRecorder(NotRecording, ABC):
    """A recorder that gathers the spans of all ranks in a step. Rank 0 writes them."""

    def __init__(self, world: World, path: Path | None) -> None:
        self.world = world
        self.path = path  # None on ranks that write no file, and after a failed write
        self.offsets: list[Offset] = []
        self.recorded = 0

    def record(self, step: int) -> None:
        """Gather and write the spans of the last step."""
        if self.recorded % COMPARED == 0:  # on all ranks at the same step, because it is a collective
            self.offsets = self._compare_clocks()
        self.recorded += 1
        told = [self._spans(), [[each.offset_s, each.uncertainty_s] for each in self.offsets]]
        every = gather(told, self.world)
        if self.path is None:
            return
        try:
            for row in self._rows(step, every):
                append_line(self.path, row)
        except MusterError as error:
            self.path = None
            warn(f"{error}; no further timeline is written")

    @abstractmethod
    def _compare_clocks(self) -> list[Offset]:
        """Measure the offsets of the ranks' clocks: a collective."""

    @abstractmethod
    def _spans(self) -> list[Any]:
        """Return this rank's spans in the step, as JSON values, on its own clock."""

    @abstractmethod
    def _rows(self, step: int, every: Sequence[Any]) -> list[dict[str, Any]]:
        """Convert the spans and clock offsets of all ranks to rows."""


class PipelineRecorder(TimelineRecorder):
    """A recorder of the actions and messages of pipelines, which measure these in every step, and of collectives."""

    def __init__(self, stages: Stages, path: Path | None) -> None:
        super().__init__(stages.world, path)
        self.pipeline, self.group = stages.pipeline, stages.group

    def expect(self, log_point: bool) -> None:
        if log_point and self.world.device.type == "cpu":
            LOG.begin(time.monotonic, self.world.device)

    def _compare_clocks(self) -> list[Offset]:
        return clock_offsets(self.group)

    def _spans(self) -> list[Any]:
        rank, now = self.world.rank, time.monotonic()
        averages = [
            Record(rank, each.operation, place, each.bytes, each.start, now if each.end is None else each.end)
            for place, each in enumerate(LOG.end())
        ]
        return [list(vars(each).values()) for each in (*records_of(self.pipeline.spans, rank), *averages)]

    def _rows(self, step: int, every: Sequence[Any]) -> list[dict[str, Any]]:
        told = [([Record(*each) for each in spans], [Offset(*each) for each in off]) for spans, off in every]
        return rows_of(step, self.pipeline.schedule, told, self.world)


class StepRecorder(TimelineRecorder):
    """A recorder of the phases of data-parallel steps, and of the collectives launched in them."""

    def __init__(self, clock: StepMarks, world: World, path: Path | None, *, mode: str, not_timed: str) -> None:
        super().__init__(world, path)
        self.clock = clock
        self.facts = {"mode": mode, "timed_by": "device" if world.device.type == "cuda" else "host"}
        self.facts["not_timed"] = not_timed
        self.log_points = 0
        self.is_on = False

    def expect(self, log_point: bool) -> None:
        if log_point:
            self.is_on = is_kept(self.log_points)
            self.log_points += 1
            if self.is_on and not self.facts["not_timed"]:
                LOG.begin(self.clock.mark, self.world.device)

    def record(self, step: int) -> None:
        if self.is_on:
            self.is_on = False
            super().record(step)

    def _compare_clocks(self) -> list[Offset]:
        group = self.world.group
        if group is None or self.world.device.type == "cuda":
            return offsets_by_meetings(group)
        # Collectives for the next forward may be in flight. Their thread also sends the pings, so these come later.
        found: list[Offset] = []
        thread_of(group).start(lambda: found.extend(clock_offsets(group)))()
        return found

    def _spans(self) -> list[Span]:
        laps, now, collectives = self.clock.newest, self.clock.mark(), LOG.end()
        bounds = [(each.start, now if (end := each.end) is None else end) for each in collectives]
        times = iter(self.clock.moments([*(mark for _, mark in laps), *chain.from_iterable(bounds)]))
        lasted = pairwise([next(times) for _ in laps])
        phases = enumerate(zip(laps[1:], lasted, strict=True))
        spans: list[Span] = [(phase, place, None, *span_s) for place, ((phase, _), span_s) in phases]
        return spans + [
            (each.operation, place, each.bytes, next(times), next(times)) for place, each in enumerate(collectives)
        ]

    def _rows(self, step: int, every: Sequence[Any]) -> list[dict[str, Any]]:
        return [step_row(step, self.facts, every)]


def is_kept(log_point: int) -> bool:
    """Return True if a log point, counted from 0, is recorded (see the module's docstring)."""
    return log_point % (1 << max(log_point.bit_length() - DENSE_BITS, 0)) == 0


def gather(mine: Any, world: World) -> list[Any]:
    """Gather a JSON value from every rank: a collective."""
    if world.group is None:
        return [mine]
    return list(gather_json(mine, world.group, device_of(world.group)).values())


def rows_of(step: int, schedule: Schedule, every: Sequence[RankRecords], world: World) -> list[dict[str, Any]]:
    """Convert the records of all ranks to rows, one for each pipeline, in order of their first ranks."""
    mesh = Mesh(world.data_ranks, world.pipe, world.tensor)
    pipelines = [mesh.ranks_of("pipe", first) for first in range(world.data_ranks * world.tensor)]
    return [
        row_of(step, schedule, ranks, on_one_clock([every[rank][0] for rank in ranks], every[ranks[0]][1]))
        for ranks in pipelines
    ]


def row_of(step: int, schedule: Schedule, ranks: Sequence[int], records: Sequence[Record]) -> dict[str, Any]:
    """Return the row of a step of one pipeline. The step may have fewer micro-batches than the schedule.

    A record of another kind than actions and messages is a collective; its `microbatch` has the bytes.
    """
    own = [each for each in records if each.kind in KINDS]
    return {
        "step": step,
        "schedule": schedule.name,
        "rank_of": [ranks[place] for place in schedule.rank_of],
        "microbatches": 1 + max((each.microbatch for each in own), default=-1),
        "chunks": schedule.stages // schedule.ranks,
        "slices": schedule.slices,
        "records": _lists(own),
        "collectives": _lists(each for each in records if each.kind not in KINDS),
    }


def _lists(records: Iterable[Record]) -> list[list[Any]]:
    return [
        [each.rank, each.kind, each.stage, each.microbatch, _short(each.start_s), _short(each.end_s)]
        for each in records
    ]


def step_row(step: int, facts: Mapping[str, Any], every: Sequence[tuple[list[Span], Any]]) -> dict[str, Any]:
    """Return the row of a data-parallel step. `every` has the spans of each rank, and rank 0's clock offsets."""
    offsets = [Offset(*each) for each in every[0][1]]
    began_s = min(
        start_s - offset.offset_s for (spans, _), offset in zip(every, offsets, strict=True) for *_, start_s, _ in spans
    )
    records = [
        [rank, *what, _short(start_s - zero_s), _short(end_s - zero_s)]
        for rank, (spans, _) in enumerate(every)
        for zero_s in [began_s + offsets[rank].offset_s]
        for *what, start_s, end_s in spans
    ]
    apart_s = max(each.uncertainty_s for each in offsets)
    return {"step": step, "rank_of": [*range(len(every))], **facts, "apart_s": _short(apart_s), "records": records}


def _short(seconds: float) -> float:
    return round(seconds, DIGITS)
