"""The paths of one rank's profile.

attempt-000/profile-00000/
  trace.json.gz  flame.svg  flame-cuda.svg  cuda-memory.pickle     the CUDA ones only on a GPU
  operators.txt  operators.csv
  profile.json                                                     written last: if it exists, all files do
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster.jobs.basics.places import At

PROFILE: Final = "profile-"


@dataclass(frozen=True)
class ProfileDir:
    """The paths of one rank's profile."""

    path: Path

    record = At("profile.json")  # the results that `muster profile` shows. Written last: if it exists, all files do
    trace = At("trace.json.gz")  # the trace of the steps, for Perfetto
    raw_trace = At("trace.tmp.json")  # the profiler's own trace, until Muster's is written
    operators = At("operators.txt")  # the table of operators, for reading
    operators_csv = At("operators.csv")  # the table of operators, for computing
    flame = At("flame.svg")  # flame graph of the host's time
    cuda_flame = At("flame-cuda.svg")  # flame graph of the device's time
    cuda_memory = At("cuda-memory.pickle")  # snapshot of the CUDA allocator, for pytorch.org/memory_viz

    @property
    def for_home(self) -> list[Path]:
        """The files to copy from a node with its own folder, the record last.

        The snapshot is omitted: it may be large.
        """
        return [self.trace, self.flame, self.cuda_flame, self.operators, self.operators_csv, self.record]
