"""The run folder: every path in it is spelt here (in a checkpoint: `jobs/checkpoint/paths.py`, in a profile:
`jobs/trace/paths.py`). One writer per file.

    runs/<name>-<utc>-<id>/
      job.yaml  site.yaml  attempts.jsonl  events.jsonl          supervisor only
      metrics.jsonl                                              rank 0 only
      submission.json  lease.json                                supervisor, and who made the folder
      token  supervisor.log  sbatch.sh  slurm.json  slurm-JOB.out   where a transport needs them
      code/                                                      the code as it was submitted
      claims/                                                    `muster resume`: who is at it, or has been
      stop.json                                                  `muster stop` only
      attempt-000/   mkdir is the token of the attempt
        placement.json  commands/                                supervisor
        node-00.json  node-00.setup                              agent of that node
        resume.json                                              supervisor: the checkpoint that the attempt began from
        rank-00000.out  rank-00000.err  metrics-00000.jsonl      that rank
        bench.jsonl                                              rank 0 only: what a `bench:` or `timing:` job measured
        memory-00000.jsonl                                       that rank of a `train:` job (`jobs/memory_rows.py`)
        profile-00000/                                           that rank, where `train.profile` is on
      checkpoints/
        step-00000050.a000/                                      complete or invisible; never used again
          shard-00000.safetensors  shard-00000.ok                writer of that rank
          MANIFEST.json                                          rank 0's writer, or the supervisor: the commit
          VERIFIED.json                                          who has read it all once more
        bad-step-00000050.a000/  trash-step-00000050.a000/       found broken; being deleted

Files are written under a temporary name and renamed; logs (`*.jsonl`, `*.out`, `*.err`) append (`jobs/files.py`). A
JSON line is one `write`, so a reader sees whole lines or an unfinished last one.
"""

import os
import re
import secrets
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from jobs.checkpoint.paths import CheckpointDir
from jobs.errors import RunFolderError
from jobs.files import folder_error
from jobs.trace.paths import PROFILE, ProfileDir

DEFAULT_RUNS: Final = "runs"
RUNS_VARIABLE: Final = "MUSTER_RUNS"
RUN_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # it stands in commands that messages print


@dataclass(frozen=True)
class RunDir:
    """The paths of one run."""

    path: Path

    @property
    def run_id(self) -> str:
        """The folder's name, unique among runs."""
        return self.path.name

    @property
    def job(self) -> Path:
        """The job file as given, with overrides applied."""
        return self.path / "job.yaml"

    @property
    def site(self) -> Path:
        """The site file as used."""
        return self.path / "site.yaml"

    @property
    def attempts(self) -> Path:
        """One line per attempt: its verdict."""
        return self.path / "attempts.jsonl"

    @property
    def events(self) -> Path:
        """One line per event of the supervisor."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """One line per step: loss over the global batch and rank 0's times."""
        return self.path / "metrics.jsonl"

    @property
    def stop(self) -> Path:
        """A request to stop, written by `muster stop`, read by the supervisor."""
        return self.path / "stop.json"

    @property
    def submission(self) -> Path:
        """How the run is started: transport, hosts, interpreter; what `launch.supervise` reads."""
        return self.path / "submission.json"

    @property
    def lease(self) -> Path:
        """The supervisor's sign of life, renewed every few seconds, for those who see the folder but not its host."""
        return self.path / "lease.json"

    @property
    def claims(self) -> Path:
        """The folder of who has resumed the run: the newest claim holds, until it is given back."""
        return self.path / "claims"

    @property
    def token(self) -> Path:
        """What agents that dial show to be let in; only the user may read it."""
        return self.path / "token"

    @property
    def supervisor_log(self) -> Path:
        """What a supervisor without a terminal says."""
        return self.path / "supervisor.log"

    @property
    def code(self) -> Path:
        """The code as it was submitted: later edits do not reach a run that waits in a queue."""
        return self.path / "code"

    @property
    def sbatch(self) -> Path:
        """The batch script as it was given to Slurm."""
        return self.path / "sbatch.sh"

    @property
    def slurm(self) -> Path:
        """What Slurm answered: its number for the job."""
        return self.path / "slurm.json"

    @property
    def submitit(self) -> Path:
        """The folder of submitit's own files: what it submitted, what its tasks printed and returned."""
        return self.path / "submitit"

    @property
    def rendezvous(self) -> Path:
        """Where submitit's first task tells the others how to reach the supervisor; only the user may read it."""
        return self.path / "rendezvous.json"

    def nonce(self, name: str) -> Path:
        """A file that one node writes and the others read, to see whether this is one folder or several."""
        return self.path / f".nonce-{name}"

    @property
    def verify(self) -> Path:
        """The comparison that `muster verify` made."""
        return self.path / "verify.json"

    @property
    def checkpoints(self) -> Path:
        """The folder of all checkpoints."""
        return self.path / "checkpoints"

    def checkpoint(self, step: int, attempt: int) -> CheckpointDir:
        """Return the paths of the checkpoint that an attempt makes after `step` steps, made or not."""
        return CheckpointDir(self.checkpoints / f"step-{step:08d}.a{attempt:03d}")

    def attempt(self, attempt: int) -> "AttemptDir":
        """Return the paths of one attempt, made or not."""
        return AttemptDir(self.path / f"attempt-{attempt:03d}")

    def attempt_numbers(self) -> list[int]:
        """List the attempts that exist, oldest first."""
        names = (entry.name for entry in self.path.glob("attempt-[0-9]*"))
        return sorted(int(name.removeprefix("attempt-")) for name in names if name.removeprefix("attempt-").isdecimal())


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
            self.path.mkdir()
            self.commands.mkdir(mode=0o700)  # the environments in there may hold secrets
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
        """What a rank's memory was for, around its first steps."""
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


def runs_root(given: str | None) -> Path:
    """Return the folder of all runs: the given one, else MUSTER_RUNS, else ./runs."""
    return Path(given or os.environ.get(RUNS_VARIABLE) or DEFAULT_RUNS).absolute()


def run_path(root: Path, name: str) -> Path:
    """Choose the path of a new run under `root`: name, time and a random part; nothing is made."""
    now = datetime.now(timezone.utc)
    return root / f"{name}-{now:%Y%m%dT%H%M%S}.{now.microsecond // 1000:03d}Z-{secrets.token_hex(3)}"


def make_run(run: RunDir) -> None:
    """Make the folder of a new run.

    Raises:
        RunFolderError: the folder cannot be made or written.
        StorageError: the disk is full.
    """
    try:
        run.path.parent.mkdir(parents=True, exist_ok=True)
        run.path.mkdir()
    except OSError as error:
        raise folder_error(run.path, error) from error


def new_run(root: Path, name: str) -> RunDir:
    """Choose and make the folder of a new run; errors as `make_run`."""
    run = RunDir(run_path(root, name))
    make_run(run)
    return run


def find_run(root: Path, given: str | None) -> RunDir:
    """Find a run by path, id, or unique part of an id; the newest when nothing is given.

    Raises:
        RunFolderError: no run or more than one fits, or its name is not one of a run.
    """
    if given and (Path(given) / "events.jsonl").is_file():
        found_path = Path(os.path.abspath(given))  # noqa: PTH100 (`..` has no name, and links stay)
        if not RUN_ID.fullmatch(found_path.name):
            raise RunFolderError(
                f"{given!r}: a run is named with letters, digits, dots, - and _ only; rename its folder"
            )
        return RunDir(found_path)
    runs = list_runs(root)
    if not runs:
        raise RunFolderError(f"{root}: no runs here; start one with muster run, or name their folder with --runs DIR")
    if given is None:
        return runs[-1]
    found = [run for run in runs if given == run.run_id] or [run for run in runs if given in run.run_id]
    if len(found) == 1:
        return found[0]
    if not found:
        raise RunFolderError(f"{root}: no run named {given!r}; newest: {', '.join(run.run_id for run in runs[-3:])}")
    names = ", ".join(run.run_id for run in found[-4:])
    raise RunFolderError(f"{root}: {given!r} fits {len(found)} runs: {names}; give more of the name")


def list_runs(root: Path) -> list[RunDir]:
    """List runs under a folder, oldest first by the time in their names."""
    if not root.is_dir():
        return []
    named = (entry for entry in root.iterdir() if RUN_ID.fullmatch(entry.name))
    runs = [RunDir(entry) for entry in named if (entry / "events.jsonl").is_file()]
    return sorted(runs, key=lambda run: (run.run_id.rsplit("-", 2)[-2:], run.run_id))
