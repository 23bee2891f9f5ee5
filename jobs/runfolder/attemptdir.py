"""The paths in the folder of one attempt; `jobs/runfolder/rundir.py` shows the whole run folder."""

import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster.jobs.basics.errors import MusterError
from muster.jobs.basics.files import folder_error, make_folder
from muster.jobs.basics.places import At, Each
from muster.jobs.basics.reading import read_json
from muster.jobs.hosts.placement import Placement
from muster.jobs.runfolder.profiledir import PROFILE, ProfileDir

OF_START: Final = re.compile(r"placement\.json|(node|metrics|memory)-\d+(\.stop)?\.\w+")
OUT: Final = "rank-{:05d}.out"
ERR: Final = "rank-{:05d}.err"


@dataclass(frozen=True)
class AttemptDir:
    """The paths of one attempt."""

    path: Path

    placement = At("placement.json")  # the node of each rank, and the origin of each value
    # the checkpoint that this attempt resumed from: {"checkpoint": its folder's name or null, "step": n}
    resume = At("resume.json")
    commands = At("commands")  # folder of the exact argv per node
    commands_from = Each("commands/nodes-from-{:05d}.jsonl")  # in large runs: those of many nodes from a number
    command = Each("commands/node-{:02d}.json")  # the exact command of one node's agent and its ranks
    node = Each("node-{:02d}.json")  # the processes that one node's agent started: pids, cores, host
    # why the programs of one node must end, and the deadline: {"reason", "message", "deadline"}
    stop = Each("node-{:02d}.stop.json")
    # the user's files that the ranks imported: {"workdir", "files": {path: sha256}}
    code = At("user-code.json")
    setup = Each("node-{:02d}.setup")  # output of the job's setup lines on one node
    out = Each(OUT)  # standard output of a rank
    err = Each(ERR)  # standard error of a rank
    metrics = Each("metrics-{:05d}.jsonl")  # a rank's own steps: local loss and times
    memory = Each("memory-{:05d}.jsonl")  # the memory of a rank around its first steps, by purpose
    timeline = At("timeline.jsonl")  # the actions of every rank in some steps (`jobs/train/timeline.py`)
    # measurements, one record per line (`collectives_bench/records.py`, `jobs/timing/records.py`)
    bench = At("bench.jsonl")

    @property
    def world_size(self) -> int | None:
        """The number of ranks; None if the attempt has no readable placement."""
        with suppress(OSError, ValueError, MusterError):
            return Placement.from_json(read_json(self.placement)).world_size
        return None

    def outputs(self, rank: int) -> tuple[str, str]:
        """Return the paths of a rank's output and error as text, without a Path for each of 100,000 ranks."""
        return f"{self.path}/{OUT.format(rank)}", f"{self.path}/{ERR.format(rank)}"

    def make(self) -> None:
        """Create the folder, which makes this attempt the newest, and in it a commands folder that only the user can
        read.

        Raises:
            RunFolderError, StorageError: if a folder cannot be created.
        """
        try:
            make_folder(self.path)
            self.commands.mkdir(mode=0o700)  # the environments in it may contain secrets
        except OSError as error:
            raise folder_error(self.path, error) from error

    def trim(self) -> None:
        """Delete the files of an old attempt that no command needs. Logs, rank 0's metrics, profiles and results stay.

        Raises:
            RunFolderError, StorageError: if a file cannot be deleted.
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

    def memory_ranks(self) -> list[int]:
        """List the ranks that recorded their memory, lowest first."""
        names = (entry.stem.removeprefix("memory-") for entry in self.path.glob("memory-*.jsonl"))
        return sorted(int(name) for name in names if name.isdecimal())

    def profile(self, rank: int) -> ProfileDir:
        """Return the paths of a rank's profile, even if it does not exist."""
        return ProfileDir(self.path / f"{PROFILE}{rank:05d}")

    def profiled_ranks(self) -> list[int]:
        """List the ranks that have a profile, lowest first."""
        names = (entry.parent.name.removeprefix(PROFILE) for entry in self.path.glob(f"{PROFILE}*/profile.json"))
        return sorted(int(name) for name in names if name.isdecimal())
