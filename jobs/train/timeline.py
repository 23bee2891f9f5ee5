"""What the ranks of a pipeline did in the steps at log points, each as one row of `attempt-NNN/timeline.jsonl`.

    {"step": 20, "schedule": "1f1b", "rank_of": [0, 1], "microbatches": 8, "chunks": 1,
     "records": [[rank, "F", stage, micro-batch, start_s, end_s], ...]}

Times count from the step's first action, on the clock of the pipeline's first rank. Only the pipeline of rank 0 is
recorded: others do the same. `muster timeline` draws it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from jobs.errors import MusterError
from jobs.files import append_line
from jobs.train.metrics import warn
from pipe import Pipeline
from pipe.schedules.actions import Schedule
from pipe.schedules.measured import Record
from pipe.timeline import Offset, clock_offsets, gather

DIGITS: Final = 7  # of a second: 0.1 us
COMPARED: Final = 10  # records between comparisons of clocks, which drift by 10 us a second and more


class NotRecording:
    """What the loop asks of a timeline, for engines that have none."""

    def record(self, step: int) -> None:
        """Record the step just done: a collective."""


class Timeline(NotRecording):
    """Gathers the last step's spans of one pipeline; its first rank writes them, where it has a `path`."""

    def __init__(self, pipeline: Pipeline, group: dist.ProcessGroup | None, path: Path | None) -> None:
        self.pipeline = pipeline
        self.group = group
        self.path = path
        self.offsets: list[Offset] | None = None
        self.recorded = 0

    def record(self, step: int) -> None:
        """Gather and write the spans of the step just done."""
        if self.recorded % COMPARED == 0:  # counted alike by all ranks: it is a collective
            self.offsets = clock_offsets(self.group)
        self.recorded += 1
        records = gather(self.pipeline.spans, self.group, self.offsets)
        if records is None or self.path is None:
            return
        row = row_of(step, self.pipeline.schedule, records)
        try:
            append_line(self.path, row)
        except MusterError as error:
            self.path = None
            warn(f"{error}; no further timeline is written")


def row_of(step: int, schedule: Schedule, records: Sequence[Record]) -> dict[str, Any]:
    """Spell a step, which may have fewer micro-batches than its schedule."""
    return {
        "step": step,
        "schedule": schedule.name,
        "rank_of": list(schedule.rank_of),
        "microbatches": 1 + max((each.microbatch for each in records), default=-1),
        "chunks": schedule.stages // schedule.ranks,
        "records": [
            [each.rank, each.kind, each.stage, each.microbatch, _short(each.start_s), _short(each.end_s)]
            for each in records
        ],
    }


def _short(seconds: float) -> float:
    return round(seconds, DIGITS)
