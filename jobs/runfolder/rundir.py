"""The paths of the run folder, and functions that create and find runs. Each file has exactly one writer.

Paths in subfolders are in `jobs/runfolder/attemptdir.py`, `jobs/runfolder/checkpointdir.py` and
`jobs/runfolder/profiledir.py`. A run is used only if no other user could have written its folder
(`jobs/basics/ownership.py`).

    runs/<name>-<utc>-<id>/
      job.yaml  site.yaml  attempts.jsonl  events.jsonl          supervisor only
      job-before-001.yaml                                        `muster resume`: the job before it was changed
      metrics.jsonl  epochs.jsonl                                rank 0 only
      submission.json  lease.json  progress.json  .reserve       supervisor, or the process that created the folder
      token  supervisor.log  sbatch.sh  slurm.json  slurm-JOB.out   only for transports that need them
      code/                                                      the code as it was submitted
      claims/                                                    `muster resume`: which processes resumed the run
      stop.json                                                  `muster stop` only
      attempt-000/   the process that creates it owns the attempt
        placement.json  commands/                                supervisor
        node-00.json  node-00.setup                              agent of that node
        user-code.json                                           rank 0: the user's files that a `train:` job imported
        resume.json                                              supervisor: the checkpoint to resume from
        rank-00000.out  rank-00000.err  metrics-00000.jsonl      that rank
        bench.jsonl                                              rank 0 only: results of a `bench:` or `timing:` job
        memory-00000.jsonl                                       that rank of a `train:` job (`memory_rows.py`)
        profile-00000/                                           that rank, if `train.profile` is on
      files/                                                     the user's program: MUSTER_FILES
      checkpoints/
        step-00000050.a000/                                      complete or invisible; the name is never reused
          shard-00000.safetensors  shard-00000.ok                writer of that rank
          MANIFEST.json                                          rank 0's writer, or the supervisor: the commit
          VERIFIED.json                                          the process that verified it
        bad-step-00000050.a000/  trash-step-00000050.a000/       a bad checkpoint; one that is being deleted

Files are written under a temporary name and renamed. Logs (`*.jsonl`, `*.out`, `*.err`) are appended to
(`jobs/basics/files.py`). Each JSON line is one `write`, so only the last line can be incomplete.
"""

import os
import re
import secrets
import shlex
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from muster.jobs.basics.errors import NotFoundError, RunFolderError, UsageError
from muster.jobs.basics.files import folder_error, write_json
from muster.jobs.basics.ownership import check_folder, check_parents, made_by_us, warn_once
from muster.jobs.basics.places import At, Each
from muster.jobs.basics.reading import UntrustedError
from muster.jobs.basics.words import counted
from muster.jobs.runfolder.attemptdir import AttemptDir as AttemptDir
from muster.jobs.runfolder.checkpointdir import CheckpointDir

DEFAULT_RUNS: Final = "runs"
RUNS_VARIABLE: Final = "MUSTER_RUNS"
WHOLE_ATTEMPTS: Final = 3  # number of newest attempts that keep all files, as the first attempt does
RUN_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")  # run ids are part of commands in messages


@dataclass(frozen=True)
class RunDir:
    """The paths of one run."""

    path: Path

    job = At("job.yaml")  # the job file as given, with overrides applied
    job_before = Each("job-before-{:03d}.yaml")  # the job file before `muster resume` changed it for an attempt
    site = At("site.yaml")  # the site file as used
    attempts = At("attempts.jsonl")  # one line per attempt, with its verdict
    events = At("events.jsonl")  # one line per event of the supervisor
    metrics = At("metrics.jsonl")  # one line per step: loss over the global batch and rank 0's times
    epochs = At("epochs.jsonl")  # one line per epoch of a training: time, rate, mean loss, evaluation
    stop = At("stop.json")  # a request to stop, written by `muster stop`, read by the supervisor
    # a request to save now. Rank 0 checks for this file at every log point, and removes it when a save begins
    save = At("save.json")
    # how to start the run: transport, hosts, interpreter. `launch.supervise` reads it
    submission = At("submission.json")
    # shows processes on other hosts that the supervisor is alive; renewed every few seconds
    lease = At("lease.json")
    progress = At("progress.json")  # the progress of every rank, rewritten by the supervisor during the run
    claims = At("claims")  # folder of claims to resume the run (`launch/submit/claim.py`)
    reserve = At(".reserve")  # a file that reserves disk space for the verdict, in case the disk is full by then
    token = At("token")  # the secret that agents need to connect to the supervisor; only the user may read it
    supervisor_log = At("supervisor.log")  # the output of a supervisor without a terminal
    code = At("code")  # a copy of the submitted code: later edits do not affect a run that waits in a queue
    sbatch = At("sbatch.sh")  # the batch script as submitted to Slurm
    slurm = At("slurm.json")  # Slurm's reply: the job id
    # folder of submitit's own files: submitted tasks, their output and their results
    submitit = At("submitit")
    # how tasks reach the supervisor, written by submitit's first task; only the user may read it
    rendezvous = At("rendezvous.json")
    # a file that one node writes and the other nodes read, to test whether they share the run folder
    nonce = Each(".nonce-{}")
    verify = At("verify.json")  # the result of `muster verify`
    files = At("files")  # folder for a program's own files, shared by all attempts: MUSTER_FILES
    checkpoints = At("checkpoints")  # the folder of all checkpoints

    @property
    def run_id(self) -> str:
        """The name of the folder, unique among runs."""
        return self.path.name

    def command(self, words: str, *, named: bool = True) -> str:
        """Return a `muster` command line for this run, valid in the current folder. `named`: include the run's id."""
        root = self.path.parent
        where = [] if root == runs_root(None) else ["--runs", str(root)]
        return shlex.join(["muster", *words.split(), *[self.run_id] * named, *where])

    def ask_to_save(self, by: str) -> None:
        """Request a save now.

        Raises:
            RunFolderError, StorageError: if the folder cannot be written.
        """
        write_json(self.save, {"time": time.time(), "by": by})

    def make_files(self) -> None:
        """Create the folder for a program's files, with the permissions of the run folder.

        Raises:
            RunFolderError, StorageError: if it cannot be created.
        """
        try:
            self.files.mkdir(mode=self.path.stat().st_mode & 0o777, exist_ok=True)
        except OSError as error:
            raise folder_error(self.files, error) from error

    def checkpoint(self, step: int, attempt: int) -> CheckpointDir:
        """Return the paths of the checkpoint that an attempt saves after `step` steps, even if it does not exist."""
        return CheckpointDir(self.checkpoints / f"step-{step:08d}.a{attempt:03d}")

    def attempt(self, attempt: int) -> AttemptDir:
        """Return the paths of one attempt, even if its folder does not exist."""
        return AttemptDir(self.path / f"attempt-{attempt:03d}")

    def trim_attempts(self, newest: int) -> None:
        """Trim the attempt that is no longer among the newest ones, but never the first. Errors as for `trim`."""
        if (old := newest - WHOLE_ATTEMPTS) > 0:
            self.attempt(old).trim()

    def attempt_numbers(self) -> list[int]:
        """List the attempts that exist, oldest first."""
        names = (entry.name for entry in self.path.glob("attempt-[0-9]*"))
        return sorted(int(name.removeprefix("attempt-")) for name in names if name.removeprefix("attempt-").isdecimal())


def runs_root(given: str | None) -> Path:
    """Return the folder of all runs: the given one, else MUSTER_RUNS, else ./runs."""
    return Path(given or os.environ.get(RUNS_VARIABLE) or DEFAULT_RUNS).absolute()


def run_path(root: Path, name: str) -> Path:
    """Return a path for a new run under `root`, built from `name`, the time and a random part. Create nothing."""
    now = datetime.now(timezone.utc)
    return root / f"{name}-{now:%Y%m%dT%H%M%S}.{now.microsecond // 1000:03d}Z-{secrets.token_hex(3)}"


def make_run(run: RunDir, *, shared: bool = False) -> None:
    """Create the folder of a new run. Only this user can access the folder; with `shared`, its group can read it.

    Raises:
        RunFolderError: if the folder cannot be created or written, or other users could access it.
        StorageError: if the disk is full.
    """
    try:
        run.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        check_parents(run.path)
        run.path.mkdir(mode=0o700)
        made_by_us(run.path, shared=shared)
    except OSError as error:
        raise folder_error(run.path, error) from error


def new_run(root: Path, name: str) -> RunDir:
    """Choose a path for a new run and create it; errors as for `make_run`."""
    run = RunDir(run_path(root, name))
    make_run(run)
    return run


def find_run(root: Path, given: str | None, *, unique: bool = False) -> RunDir:
    """Find a run by path, id, or part of an id. If several match, or `given` is None, return the newest.

    Args:
        unique: raise an error if several runs match, for commands that change a run.

    Raises:
        NotFoundError: if no run matches.
        UsageError: if several runs match and `unique` is set.
        RunFolderError: if the folder's name is not a valid run id.
        UntrustedError: if other users could write the folder of the run, or a folder above it.
    """
    if given and os.path.isfile(os.path.join(given, "events.jsonl")):  # noqa: PTH113, PTH118 (no error if unreadable)
        path = Path(os.path.abspath(given))  # noqa: PTH100 (`..` has no name, and links stay)
        if not RUN_ID.fullmatch(path.name):
            raise RunFolderError(
                f"{given!r}: the name of a run may have only letters, digits, `.`, `-` and `_`; rename its folder"
            )
        return open_run(path)
    runs, strange = (list_runs(root), []) if given is None else _sorted_runs(root)
    found = runs[-1:] if given is None else _named(given, runs)
    if found and unique and len(found) > 1:
        names = ", ".join(run.run_id for run in found[-4:])
        raise UsageError(f"{root}: {given!r} matches {len(found)} runs: {names}; give more of the name")
    if found:
        note_choice(given, found[-1].run_id, len(found), "run")
        return found[-1]
    if given and (others := _named(given, strange)):
        return open_run(others[-1].path)  # raises an error with the reason why this run is refused
    if not runs:
        raise NotFoundError(f"{root}: no runs here; start one with muster run, or name another folder with --runs DIR")
    raise NotFoundError(f"{root}: no run named {given!r}; newest: {', '.join(run.run_id for run in runs[-3:])}")


def note_choice(given: str | None, chosen: str, count: int, what: str) -> None:
    """If several runs match, print on standard error which one was chosen."""
    if count > 1:
        print(f"muster: {given!r} matches {count} {what}s; using the newest, {chosen}", file=sys.stderr)


def open_run(path: Path, *, warn: bool = True) -> RunDir:
    """Return the run in a folder, after checking that no other user could have written it.

    Raises:
        UntrustedError: if another user could have written it.
        RunFolderError: if there is no such folder.
    """
    path = path.absolute()
    check_folder(path, warn=warn)
    check_parents(path, warn=warn)
    return RunDir(path)


def list_runs(root: Path) -> list[RunDir]:
    """List the runs under a folder, sorted by the time in their names, oldest first. Runs of other users are omitted.

    Raises:
        UntrustedError: if other users can replace folders under `root`.
    """
    runs, strange = _sorted_runs(root)
    if strange:
        what = counted(len(strange), "run folder")
        warn_once(f"{root}: skipped {what} of other users; to see why, name one in a command", f"others in {root}")
    return runs


def all_runs(root: Path) -> list[RunDir]:
    """List all folders of any user under `root` that look like runs. `check_folder` must check one before it is read.

    Raises:
        RunFolderError: if `root` cannot be listed.
    """
    try:
        entries = [each for each in root.iterdir() if RUN_ID.fullmatch(each.name)] if root.is_dir() else []
    except OSError as error:
        raise RunFolderError(
            f"{root}: cannot be listed: {error.strerror}; choose another folder with --runs DIR"
        ) from error
    runs = [RunDir(each) for each in entries if os.path.isfile(each / "events.jsonl")]  # noqa: PTH113 (as above)
    return sorted(runs, key=lambda run: (run.run_id.rsplit("-", 2)[-2:], run.run_id))


def _sorted_runs(root: Path) -> tuple[list[RunDir], list[RunDir]]:
    """Return two lists of the runs under a folder: runs that only this user can write, and all others."""
    found = all_runs(root)
    if found:
        check_parents(found[0].path)
    ours: list[RunDir] = []
    strange: list[RunDir] = []
    for run in found:
        try:
            check_folder(run.path)
            ours.append(run)
        except UntrustedError:
            strange.append(run)
    return ours, strange


def _named(given: str, runs: list[RunDir]) -> list[RunDir]:
    return [run for run in runs if given == run.run_id] or [run for run in runs if given in run.run_id]
