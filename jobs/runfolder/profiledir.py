"""The paths of one rank's profile.

attempt-000/profile-00000/
  trace.json.gz  flame.svg  flame-cuda.svg  cuda-memory.pickle     the CUDA files only with a GPU
  flame.json     flame-cuda.json                                   the same flame graphs as data, for `muster report`
  operators.txt  operators.csv
  profile.json                                                     written last, so all other files are then complete
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

    record = At("profile.json")  # the results that `muster profile` shows, written after all other files
    trace = At("trace.json.gz")  # the trace of the steps, for Perfetto
    raw_trace = At("trace.tmp.json")  # the profiler's own trace, deleted after it is read
    operators = At("operators.txt")  # the table of operators, as text
    operators_csv = At("operators.csv")  # the table of operators, as CSV
    flame = At("flame.svg")  # flame graph of the host's time
    cuda_flame = At("flame-cuda.svg")  # flame graph of the device's time
    flame_data = At("flame.json")  # the frames of flame.svg
    cuda_flame_data = At("flame-cuda.json")  # the frames of flame-cuda.svg
    cuda_memory = At("cuda-memory.pickle")  # snapshot of the CUDA allocator, for pytorch.org/memory_viz

    @property
    def for_home(self) -> list[Path]:
        """The files to copy from a node without the shared run folder, record last; the large snapshot stays there."""
        flames = [self.flame, self.cuda_flame, self.flame_data, self.cuda_flame_data]
        return [self.trace, *flames, self.operators, self.operators_csv, self.record]
