"""Call Slurm's commands with timeouts, to submit, query and cancel jobs, and parse their output.

The states of all jobs come from one call of squeue. The end of a job is read from scontrol while the controller
remembers the job (MinJobAge, 300 s), and later from sacct, if accounting is set up.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from muster.jobs.basics import exits
from muster.jobs.basics.errors import MusterError, RefusedError, UnreachableError
from muster.slurm.refusals import NOT_SET_UP, essence, not_set_up
from muster.slurm.states import JobState

SUBMIT_S: Final = 60.0  # sbatch waits and retries if the controller is busy
QUERY_S: Final = 30.0  # squeue itself gives up after 18 s if the controller does not answer
LIST_S: Final = 5.0
RUNNING: Final = "RUNNING"
_SQUEUE: Final = "%i|%T|%j|%N|%e|%B|%r"
_SACCT: Final = "JobID,State,JobName,NodeList,End,ExitCode,Reason"
_PARTITION: Final = "%R (%D nodes of %c cores and %m MB, limit %l)"
_UNKNOWN: Final = "(?i)invalid job id|job id invalid|not found"
_GONE: Final = _UNKNOWN + "|already completing or completed|already finished"
_AMBIGUOUS: Final = "(?i)timed out|Zero Bytes|Message receive failure|receive failure"
# Variables in the user's environment that would change the output of squeue and sacct.
_CHANGING: Final = ("SQUEUE_", "SACCT_", "SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN", "SINFO_", "SCONTROL_")


@dataclass(frozen=True)
class Submitted:
    """sbatch's answer: the job id, the cluster if there are several, and any other output."""

    job_id: str
    cluster: str | None = None
    notes: str = ""


class SubmissionRefusedError(MusterError):
    """The error raised if sbatch submits nothing. Its message is sbatch's own text, which `slurm.refusals` explains."""

    exit_code = exits.REFUSED


@dataclass(frozen=True)
class Client:
    """Slurm's commands for one cluster, called with `environment`."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    cluster: str | None = None

    def submit(self, script: Path, *, name: str, environment: Mapping[str, str] | None = None) -> Submitted:
        """Submit a batch script. `name` must be unique, so that the job can be found if sbatch's answer is lost.

        `environment` is for sbatch and the job (default: that of the other commands).

        Raises:
            SubmissionRefusedError: if sbatch refused.
            RefusedError: if Slurm is not set up on this machine.
            UnreachableError: if sbatch did not answer, and no job has this name.
        """
        argv = ["sbatch", "--parsable", *self._clusters(), str(script)]
        try:
            code, out, said = self._call(argv, SUBMIT_S, environment=environment)
        except UnreachableError:
            return self._found(name) or self._fail()
        if code == 0 and (match := re.fullmatch(r"(\d+)(?:;(\S+))?", out.strip().rpartition("\n")[2])):
            return Submitted(match[1], match[2] or self.cluster, said.strip())
        if re.search(NOT_SET_UP, said):
            raise not_set_up(said)
        if re.search(_AMBIGUOUS, said) and (found := self._found(name)):
            return found
        raise SubmissionRefusedError(said.strip() or out.strip())

    def query(self, job_ids: Iterable[str]) -> dict[str, JobState]:
        """Return the states of jobs; unknown jobs are omitted.

        Raises:
            RefusedError: if Slurm is not set up on this machine.
            UnreachableError: if the controller does not answer.
        """
        wanted = list(dict.fromkeys(job_ids))
        states = {state.job_id: state for state in self._squeue(wanted) if state.job_id in wanted}
        for job_id in wanted:
            state = states.get(job_id)
            if (state is None or state.phase == "over") and (told := self.details(job_id) or self._sacct(job_id)):
                states[job_id] = told
        return states

    def grace_s(self, partition: str) -> float:
        """Return a partition's GraceTime in seconds, 0 if unknown. Raises the same errors as `query`."""
        _, out, _ = self._call(["scontrol", *self._clusters(), "--oneliner", "show", "partition", partition], LIST_S)
        match = re.search(r"\bGraceTime=(\d{1,9})\b", out)
        return float(match[1]) if match else 0.0

    def cancel(self, job_id: str) -> None:
        """Cancel a waiting or running job; do nothing if it is over.

        Raises:
            RefusedError: if the job belongs to another user, or Slurm is not set up on this machine.
            UnreachableError: if the controller does not answer.
        """
        code, _, said = self._call(["scancel", *self._clusters(), job_id], QUERY_S)
        if code == 0 or re.search(_GONE, said):
            return
        if "denied" in said:
            raise RefusedError(f"slurm job {job_id}: scancel says: {essence(said)}; only its owner can cancel it")
        raise UnreachableError(f"slurm job {job_id}: scancel says: {essence(said)}; try again, or see scontrol ping")

    def word(self, job_id: str) -> str:
        """Return squeue's word for the state of a job, "gone" if the job is unknown, or the error message."""
        try:
            found = self._squeue([job_id])
        except MusterError as error:
            return str(error)
        return found[0].state if found else "gone"

    def refused(self, *argv: str) -> str:
        """Call one of Slurm's commands; return "" if it succeeded, else its error message."""
        try:
            code, out, said = self._call([argv[0], *self._clusters(), *argv[1:]], QUERY_S)
        except MusterError as error:
            return str(error)
        return (said or out).strip() or f"code {code}" if code else ""

    def partitions(self) -> str:
        """Describe the partitions in one line for a message; empty if sinfo fails."""
        try:
            code, out, _ = self._call(["sinfo", *self._clusters(), "--noheader", f"--format={_PARTITION}"], LIST_S)
        except MusterError:
            return ""
        return ", ".join(dict.fromkeys(line.strip() for line in out.splitlines() if line.strip())) if code == 0 else ""

    def _squeue(self, job_ids: Sequence[str]) -> list[JobState]:
        if not job_ids:
            return []
        argv = ["squeue", *self._clusters(), "--noheader", "--array", "--states=all", f"--format={_SQUEUE}"]
        code, out, said = self._call([*argv, f"--jobs={','.join(job_ids)}"], QUERY_S)
        if code and not re.search(_UNKNOWN, said):
            raise self._unreachable("squeue", said)
        return [state for line in out.splitlines() if (state := from_squeue(line)) is not None]

    def details(self, job_id: str, timeout_s: float = QUERY_S) -> JobState | None:
        """Return scontrol's record of a job; None for an unknown job. Raises the same errors as `query`."""
        code, out, said = self._call(["scontrol", *self._clusters(), "--oneliner", "show", "job", job_id], timeout_s)
        if code and not re.search(_UNKNOWN, said + out):
            raise self._unreachable("scontrol", said or out)
        return None if code else from_scontrol(out, job_id)

    def _sacct(self, job_id: str) -> JobState | None:
        """Return sacct's record of a job; None if accounting is not set up, is down, or does not know the job."""
        argv = ["sacct", *self._clusters(), "--noheader", "--parsable2", "--allocations", f"--format={_SACCT}"]
        if shutil.which("sacct", path=self.environment.get("PATH")) is None:
            return None
        code, out, _ = self._call([*argv, f"--jobs={job_id}"], QUERY_S)
        found = [state for line in out.splitlines() if (state := from_sacct(line)) is not None]
        return next((state for state in found if state.job_id == job_id), None) if code == 0 else None

    def _found(self, name: str) -> Submitted | None:
        """Find a job by its name, after sbatch's answer was lost."""
        argv = ["squeue", *self._clusters(), "--noheader", f"--name={name}", "--format=%i"]
        code, out, _ = self._call(argv, QUERY_S)
        ids = [line.strip().partition("_")[0] for line in out.splitlines() if line.strip()]
        return (
            Submitted(ids[0], self.cluster, "sbatch's answer was lost, but the job exists")
            if not code and ids
            else None
        )

    def _fail(self) -> Submitted:
        raise UnreachableError(
            f"slurm: sbatch has not answered within {SUBMIT_S:g} s, and the job does not exist; see scontrol ping"
        )

    def _clusters(self) -> list[str]:
        return [] if self.cluster is None else [f"--clusters={self.cluster}"]

    def _unreachable(self, program: str, said: str) -> MusterError:
        if re.search(NOT_SET_UP, said):
            return not_set_up(said)
        return UnreachableError(f"slurm: {program} says: {essence(said)}; try again, or see scontrol ping")

    def _call(
        self, argv: Sequence[str], timeout_s: float, *, environment: Mapping[str, str] | None = None
    ) -> tuple[int, str, str]:
        base = self.environment if environment is None else environment
        env = {name: value for name, value in base.items() if not name.startswith(_CHANGING)}
        program = shutil.which(argv[0], path=env.get("PATH"))
        if program is None:
            raise RefusedError(
                f"slurm: {argv[0]} is not on PATH here; run this on the cluster's login node, or choose another --on"
            )
        if (conf := env.get("SLURM_CONF")) and not Path(conf).exists():  # Slurm's commands wait a minute for it
            raise RefusedError(f"slurm: SLURM_CONF={conf}: no such file; correct the variable, or unset it")
        try:
            done = subprocess.run(
                [program, *argv[1:]],
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
                start_new_session=True,  # so that Ctrl-C in the terminal does not reach the command
            )
        except subprocess.TimeoutExpired as error:
            raise UnreachableError(
                f"slurm: {argv[0]} has not answered within {timeout_s:g} s; try again, or see scontrol ping"
            ) from error
        return done.returncode, done.stdout, done.stderr


def end_orphan(environ: Mapping[str, str], *, requeue: bool) -> str:
    """End this process's job after the supervisor's node was lost; return the action as text.

    With --no-kill Slurm would keep the other nodes until the time limit. A job that Slurm considers running is requeued
    or cancelled. Nothing is done for a job that is being cancelled, because scontrol would requeue it.
    """
    job, client = environ.get("SLURM_JOB_ID", ""), Client(environ)
    if (state := client.word(job)) != RUNNING:
        return f"Slurm job {job}: {state}"
    argv = ["scontrol", "requeue", job] if requeue else ["scancel", job]
    return f"{' '.join(argv)}: {client.refused(*argv) or 'done'}"


def from_squeue(line: str) -> JobState | None:
    """Parse one line of squeue; None if the line has another form."""
    if (fields := _fields(line)) is None:
        return None
    job_id, state, name, nodes, end, host, reason = fields
    return JobState(job_id, name, state, reason, nodes, end_time=unix_s(end), batch_host="" if host == "n/a" else host)


def from_scontrol(text: str, job_id: str) -> JobState | None:
    """Parse `scontrol --oneliner show job` for one job; a requeued job's first record is its newest."""

    def value(key: str, default: str = "") -> str:
        match = re.search(rf"(?:^|\s){key}=(\S*)", text)
        return match[1] if match and match[1] not in ("(null)", "None") else default

    if not (state := value("JobState")):
        return None
    code, _, signal = value("ExitCode", "0:0").partition(":")
    restarts = value("Restarts", "0")
    return JobState(
        job_id,
        value("JobName"),
        state,
        value("Reason"),
        value("NodeList"),
        exit_code=_number(code),
        signal=_number(signal),
        restarts=_number(restarts),
        end_time=unix_s(value("EndTime")),
        batch_host=value("BatchHost"),
        preempted=unix_s(value("PreemptTime")),
    )


def from_sacct(line: str) -> JobState | None:
    """Parse one line of sacct; None if the line has another form. `CANCELLED by 1000` is read as CANCELLED."""
    if (fields := _fields(line)) is None:
        return None
    job_id, state, name, nodes, end, exit_code, reason = fields
    code, _, signal = exit_code.partition(":")
    return JobState(
        job_id,
        name,
        state.partition(" ")[0].rstrip("+"),
        reason,
        "" if nodes == "None assigned" else nodes,
        exit_code=_number(code),
        signal=_number(signal),
        end_time=unix_s(end),
    )


def _fields(line: str) -> list[str] | None:
    """Return the seven fields of a line of squeue or sacct."""
    fields = [each.strip() for each in line.split("|", 6)]
    return fields if len(fields) == 7 else None


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def unix_s(text: str) -> float | None:
    """Convert a time printed by Slurm (in the local time zone) to unix seconds; None for words such as `Unknown`."""
    try:
        return time.mktime(datetime.fromisoformat(text).timetuple())
    except ValueError:
        return None
