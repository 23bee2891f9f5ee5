"""The paths of one rank's profile.

attempt-000/profile-00000/
  trace.json.gz  flame.svg  flame-cuda.svg  cuda-memory.pickle     the CUDA ones where there is a GPU
  operators.txt  operators.csv
  profile.json                                                     last: where it is, all is
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROFILE: Final = "profile-"

# What a node that does not share the run folder sends home, the record last. A snapshot of memory, which may be large,
# stays where it is.
FOR_HOME: Final = (
    "trace.json.gz",
    "flame.svg",
    "flame-cuda.svg",
    "operators.txt",
    "operators.csv",
    "profile.json",
)


@dataclass(frozen=True)
class ProfileDir:
    """The paths of one rank's profile."""

    path: Path

    @property
    def for_home(self) -> list[Path]:
        """The files that come home from a node with a folder of its own."""
        return [self.path / name for name in FOR_HOME]

    @property
    def record(self) -> Path:
        """What came of it: what `muster profile` shows. Written last: where it is, all is."""
        return self.path / "profile.json"

    @property
    def trace(self) -> Path:
        """The steps as they went, for Perfetto."""
        return self.path / "trace.json.gz"

    @property
    def raw_trace(self) -> Path:
        """The profiler's own trace, until ours is written."""
        return self.path / "trace.tmp.json"

    @property
    def operators(self) -> Path:
        """The table of operators, to read."""
        return self.path / "operators.txt"

    @property
    def operators_csv(self) -> Path:
        """The table of operators, to compute with."""
        return self.path / "operators.csv"

    @property
    def flame(self) -> Path:
        """Flame graph of the host's time."""
        return self.path / "flame.svg"

    @property
    def cuda_flame(self) -> Path:
        """Flame graph of the device's time."""
        return self.path / "flame-cuda.svg"

    @property
    def cuda_memory(self) -> Path:
        """Snapshot of the CUDA allocator, for pytorch.org/memory_viz."""
        return self.path / "cuda-memory.pickle"
