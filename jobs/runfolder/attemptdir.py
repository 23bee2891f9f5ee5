"""The paths in the folder of one attempt, a part of the run folder that `jobs/runfolder/rundir.py` draws."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster.jobs.basics.files import folder_error, make_folder
from muster.jobs.runfolder.profiledir import PROFILE, ProfileDir

OF_START: Final = re.compile(r"placement\.json|(node|metrics|memory)-\d+(\.stop)?\.\w+")


@dataclass(frozen=True)
class AttemptDir:
    """The paths of one attempt."""

    path: Path

    def make(self) -> None:
        """Make the folder, the token of the attempt, and the commands' in it, which only the user may read.

        Raises:
            RunFolderError, StorageError: it cannot be made.
        """
        try:
            make_folder(self.path)
            self.commands.mkdir(mode=0o700)  # the environments in there may hold secrets
        except OSError as error:
            raise folder_error(self.path, error) from error

    def trim(self) -> None:
        """Delete what no command asks of an old attempt. Its logs, rank 0's steps, profiles and results stay.

        Raises:
            RunFolderError, StorageError: something cannot be deleted.
        """
        try:
            for path in self.path.glob("*"):
                is_empty = path.suffix in (".out", ".err") and not path.lstat().st_size
                if is_empty or (OF_START.fullmatch(path.name) and path != self.metrics(0)):
                    path.unlink()
            if self.commands.is_dir():
                shutil.rmtree(self.commands)
        except OSError as error:
            raise folder_error(self.path, error) from error

    @property
    def placement(self) -> Path:
        """Which rank runs where, and each value's origin."""
        return self.path / "placement.json"

    @property
    def resume(self) -> Path:
        """The checkpoint that this attempt began from: {"checkpoint": its folder's name or null, "step": n}."""
        return self.path / "resume.json"

    @property
    def commands(self) -> Path:
        """Folder of the exact argv per node."""
        return self.path / "commands"

    def command(self, node_rank: int) -> Path:
        """The exact command of one node's agent and its ranks."""
        return self.commands / f"node-{node_rank:02d}.json"

    def node(self, node_rank: int) -> Path:
        """What one node's agent started: pids, cores, host."""
        return self.path / f"node-{node_rank:02d}.json"

    def stop(self, node_rank: int) -> Path:
        """Why and until when the programs of one node are asked to end: {"reason", "message", "deadline"}."""
        return self.path / f"node-{node_rank:02d}.stop.json"

    def setup(self, node_rank: int) -> Path:
        """Output of the job's setup lines on one node."""
        return self.path / f"node-{node_rank:02d}.setup"

    def out(self, rank: int) -> Path:
        """Standard output of a rank."""
        return self.path / f"rank-{rank:05d}.out"

    def err(self, rank: int) -> Path:
        """Standard error of a rank."""
        return self.path / f"rank-{rank:05d}.err"

    def metrics(self, rank: int) -> Path:
        """A rank's own steps: local loss and times."""
        return self.path / f"metrics-{rank:05d}.jsonl"

    def memory(self, rank: int) -> Path:
        """The memory of a rank around its first steps, by purpose."""
        return self.path / f"memory-{rank:05d}.jsonl"

    def memory_ranks(self) -> list[int]:
        """List the ranks that have said what their memory was for, lowest first."""
        names = (entry.stem.removeprefix("memory-") for entry in self.path.glob("memory-*.jsonl"))
        return sorted(int(name) for name in names if name.isdecimal())

    @property
    def timeline(self) -> Path:
        """What every rank of a pipeline did in some steps (`jobs/train/timeline.py`)."""
        return self.path / "timeline.jsonl"

    def profile(self, rank: int) -> ProfileDir:
        """Return the paths of a rank's profile, made or not."""
        return ProfileDir(self.path / f"{PROFILE}{rank:05d}")

    def profiled_ranks(self) -> list[int]:
        """List the ranks whose profiles are there, lowest first."""
        names = (entry.parent.name.removeprefix(PROFILE) for entry in self.path.glob(f"{PROFILE}*/profile.json"))
        return sorted(int(name) for name in names if name.isdecimal())

    @property
    def bench(self) -> Path:
        """What has been measured: a record a line (`collectives_bench/records.py`, `jobs/timing/records.py`)."""
        return self.path / "bench.jsonl"
