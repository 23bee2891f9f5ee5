"""What all ranks did in the steps at log points: a row of `attempt-NNN/timeline.jsonl` for each pipeline.

    {"step": 20, "schedule": "1f1b", "rank_of": [1, 3], "microbatches": 8, "chunks": 1,
     "records": [[rank, "F", stage, micro-batch, start_s, end_s], ...]}

Ranks are those of the world, `rank_of` has that of every stage. Times count from the pipeline's first action in the
step, on the clock of its first rank. A row takes about 45 bytes a record, of which a rank has some six a micro-batch.
`muster timeline` draws it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from muster.jobs.basics.errors import MusterError
from muster.jobs.basics.files import append_line
from muster.jobs.basics.terminal import warn
from muster.jobs.train.parallel.stages import Stages
from muster.jobs.world.world import World
from muster.pipe.mesh import Mesh
from muster.pipe.schedules.actions import Schedule
from muster.pipe.schedules.measured import Record
from muster.pipe.timeline import Offset, clock_offsets, on_one_clock, records_of

DIGITS: Final = 7  # of a second: 0.1 us
COMPARED: Final = 10  # records between comparisons of clocks, which drift by 10 us a second and more

Told = tuple[list[Record], list[Offset]]  # what a rank did, and, if it is a pipeline's first, how far clocks are off


class NotRecording:
    """What the loop asks of a timeline, for engines that have none."""

    def record(self, step: int) -> None:
        """Record the step just done: a collective."""


class Recorder(NotRecording):
    """Gathers what all ranks did in the last step; rank 0 writes it."""

    def __init__(self, stages: Stages, path: Path | None) -> None:
        self.pipeline, self.group, self.world = stages.pipeline, stages.group, stages.world
        self.path = path  # None: on other ranks, and where it could not be written
        self.offsets: list[Offset] = []
        self.recorded = 0

    def record(self, step: int) -> None:
        """Gather and write the spans of the step just done."""
        if self.recorded % COMPARED == 0:  # counted alike by all ranks: it is a collective
            self.offsets = clock_offsets(self.group)
        self.recorded += 1
        every = gather((records_of(self.pipeline.spans, self.world.rank), self.offsets), self.world)
        if self.path is None:
            return
        try:
            for row in rows_of(step, self.pipeline.schedule, every, self.world):
                append_line(self.path, row)
        except MusterError as error:
            self.path = None
            warn(f"{error}; no further timeline is written")


def gather(mine: Told, world: World) -> list[Told]:
    """Return what every rank has told, on rank 0: a collective."""
    if world.group is None:
        return [mine]
    every: list[Any] = [None] * world.size
    dist.gather_object(mine, every if world.rank == 0 else None, group=world.group, group_dst=0)
    return every


def rows_of(step: int, schedule: Schedule, every: Sequence[Told], world: World) -> list[dict[str, Any]]:
    """Put what all ranks did into rows, one for each pipeline, in order of their first ranks."""
    mesh = Mesh(world.data_ranks, world.pipe, world.tensor)
    pipelines = [mesh.ranks_of("pipe", first) for first in range(world.data_ranks * world.tensor)]
    return [
        row_of(step, schedule, ranks, on_one_clock([every[rank][0] for rank in ranks], every[ranks[0]][1]))
        for ranks in pipelines
    ]


def row_of(step: int, schedule: Schedule, ranks: Sequence[int], records: Sequence[Record]) -> dict[str, Any]:
    """Spell a step of a pipeline of these ranks, which may have fewer micro-batches than its schedule."""
    return {
        "step": step,
        "schedule": schedule.name,
        "rank_of": [ranks[place] for place in schedule.rank_of],
        "microbatches": 1 + max((each.microbatch for each in records), default=-1),
        "chunks": schedule.stages // schedule.ranks,
        "records": [
            [each.rank, each.kind, each.stage, each.microbatch, _short(each.start_s), _short(each.end_s)]
            for each in records
        ],
    }


def _short(seconds: float) -> float:
    return round(seconds, DIGITS)
