"""Find out why Slurm ended the supervisor's job, from the output of the batch script that execs the supervisor.

On scancel, a requeue, a preemption or the time limit, Slurm signals supervisor, agents and ranks at the same time. The
supervisor may see agents or ranks end before its own signal arrives. But Slurm writes its message to the output before
it sends any signal.
"""

import os
from pathlib import Path
from typing import Final

from muster.jobs.basics import exits
from muster.jobs.basics.reading import MOST_BYTES, open_file, target_of
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.records.verdict import RankEnd, Stop
from muster.slurm.complaints import Complaint, complaint
from muster.slurm.script import OUTPUT

KILLED: Final = ("SIGTERM", "SIGKILL")


class BatchOutput:
    """The batch script's output from now on. A requeued job appends to the output of its earlier starts."""

    def __init__(self, run: RunDir, job: str) -> None:
        self.path = Path(run.path) / OUTPUT.replace("%j", job)
        self.offset = self.path.stat().st_size if self.path.is_file() else 0
        self.judged = self.offset  # output before this offset is of an earlier attempt

    def complaint(self) -> Complaint | None:
        """Return Slurm's message about the end of the job, or None."""
        return complaint(self._lines(self.offset))

    def _lines(self, offset: int) -> list[str]:
        if not self.path.is_file():
            return []
        with open_file(target_of(self.path)) as file:
            file.seek(max(offset, file.seek(0, os.SEEK_END) - MOST_BYTES))
            lines = file.read(MOST_BYTES).decode(errors="replace").splitlines()
            self.judged = file.tell()
        return lines

    def cause(self, first: RankEnd | None) -> Stop | None:
        """Return why Slurm ended an attempt; None if no message of Slurm can explain the first failure."""
        by_slurm = first is not None and (first.rank is None or first.signal in KILLED)
        lines = self._lines(self.judged)
        found = complaint(lines) if by_slurm else None
        if found is None or first is None:
            return None
        if found.of_a_node:
            where = first.where() if found.host in ("", first.host) else found.host
            return Stop(found.code, f"{where}: {found.message}")
        return Stop(found.code, found.message, final=found.code != exits.UNREACHABLE)
