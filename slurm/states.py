"""Interpret Slurm's words for a job's state, its reason to wait, and its end. The module consists of tables and pure
functions.

The words come from squeue(1) and scontrol(1). Words that newer versions of Slurm add are shown unchanged.
"""

import re
from dataclasses import dataclass
from typing import Final, Literal

from muster.jobs.basics import exits
from muster.jobs.hosts.nodelist import expand

Phase = Literal["pending", "running", "over"]

FAILED: Final = 1


@dataclass(frozen=True)
class JobState:
    """Slurm's record of a job at one moment. Times are in Unix seconds; `nodes` is a node list, or empty."""

    job_id: str
    name: str
    state: str
    reason: str = ""
    nodes: str = ""
    exit_code: int = 0
    signal: int = 0
    restarts: int = 0
    end_time: float | None = None
    batch_host: str = ""
    preempted: float | None = None

    @property
    def phase(self) -> Phase:
        """Return the phase of the state. An unknown state counts as running, because it is neither queued nor over."""
        row = STATES.get(self.state)
        return row.phase if row is not None else "running"


@dataclass(frozen=True)
class StateRow:
    """One of Slurm's states: its phase, a description, and the exit code of a run that ends in it without a verdict."""

    phase: Phase
    code: int | None
    sentence: str


@dataclass(frozen=True)
class JobOutcome:
    """The end of a job according to Slurm, as an exit code and a message."""

    code: int
    message: str


@dataclass(frozen=True)
class ReasonRow:
    """A reason for waiting: a pattern of Slurm's words, a description, and whether the job can never start."""

    words: str
    sentence: str
    never: bool = False


STATES: Final[dict[str, StateRow]] = {
    "PENDING": StateRow("pending", None, "it waits in the queue"),
    "REQUEUED": StateRow("pending", None, "it is being queued again"),
    "REQUEUE_FED": StateRow("pending", None, "it is being queued again"),
    "REQUEUE_HOLD": StateRow("pending", None, "it was queued again and is held; release it: scontrol release {id}"),
    "SPECIAL_EXIT": StateRow("pending", None, "it was queued again and is held; release it: scontrol release {id}"),
    "RESV_DEL_HOLD": StateRow(
        "pending", None, "it is held, because its reservation was deleted: scontrol release {id}"
    ),
    "CONFIGURING": StateRow("pending", None, "its nodes are being prepared"),
    "RUNNING": StateRow("running", None, "it is running"),
    "SUSPENDED": StateRow("running", None, "it is suspended"),
    "STOPPED": StateRow("running", None, "it is stopped"),
    "SIGNALING": StateRow("running", None, "it is being signalled"),
    "RESIZING": StateRow("running", None, "it is changing its size"),
    "STAGE_OUT": StateRow("running", None, "its files are being copied"),
    "COMPLETING": StateRow("running", None, "it is ending"),
    "COMPLETED": StateRow("over", FAILED, "it ended with exit code 0, but its supervisor left no verdict"),
    "FAILED": StateRow("over", None, "it failed"),
    "CANCELLED": StateRow("over", exits.STOPPED, "it was cancelled"),
    "TIMEOUT": StateRow("over", exits.TIMEOUT, "it reached its time limit; raise slurm.time"),
    "DEADLINE": StateRow("over", exits.TIMEOUT, "it reached its deadline (--deadline)"),
    "OUT_OF_MEMORY": StateRow("over", FAILED, "it ran out of memory; raise slurm.mem, or put fewer ranks on a node"),
    "NODE_FAIL": StateRow("over", exits.UNREACHABLE, "one of its nodes failed"),
    "BOOT_FAIL": StateRow("over", exits.UNREACHABLE, "one of its nodes could not be started"),
    "LAUNCH_FAILED": StateRow("over", exits.UNREACHABLE, "it could not be launched on its node"),
    "RECONFIG_FAIL": StateRow("over", exits.UNREACHABLE, "one of its nodes could not be set up"),
    "PREEMPTED": StateRow("over", exits.INFRASTRUCTURE, "another job took its nodes"),
    "REVOKED": StateRow("over", exits.INFRASTRUCTURE, "another cluster of the federation started it"),
}

_HELD: Final = "release it: scontrol release {id}"
REASONS: Final[tuple[ReasonRow, ...]] = (
    ReasonRow("None|WaitingForScheduling|SchedDefer", "the scheduler has not examined it yet"),
    ReasonRow("Resources", "it waits for nodes to become free"),
    ReasonRow("Priority", "jobs of higher priority come first"),
    ReasonRow("BeginTime", "its earliest start time has not come yet (after a failure, Slurm waits two minutes)"),
    ReasonRow("Cleaning", "it is being queued again, and Slurm is still cleaning up its last start"),
    ReasonRow(
        "DependencyNeverSatisfied",
        "the job that it depends on did not end as required, so it will never start",
        never=True,
    ),
    ReasonRow("Dependency", "it waits for the job that it depends on"),
    ReasonRow("JobHeldUser|job.requeued.in.held.state", f"it is held by its user; {_HELD}"),
    ReasonRow("JobHeldAdmin", "it is held by an administrator: ask them to release it"),
    ReasonRow("JobHoldMaxRequeue", f"it is held, because it was requeued too often; {_HELD}", never=True),
    ReasonRow(
        "(?i)(launch_failed_requeued_held|launch failed requeued held|JobLaunchFailure)",
        f"it could not be started on its node, and is held; see slurmd's log there, then {_HELD}",
        never=True,
    ),
    ReasonRow(
        "PartitionNodeLimit",
        "the job requests more nodes than the partition has or allows: lower nodes, or change slurm.partition",
        never=True,
    ),
    ReasonRow(
        "PartitionConfig",  # shown until the scheduler examines the job, or permanently if no node is large enough
        "the partition lacks the nodes requested: lower nodes, slurm.cpus_per_task or mem, or change slurm.partition",
        never=True,
    ),
    ReasonRow(
        "PartitionTimeLimit",
        "the partition allows less time: lower slurm.time, or change slurm.partition",
        never=True,
    ),
    ReasonRow("PartitionDown|PartitionInactive", "the partition is closed: change slurm.partition, or wait"),
    ReasonRow(
        "BadConstraints", "no node satisfies the job's constraints: change slurm.constraint, mem or cpus", never=True
    ),
    ReasonRow(
        "InvalidAccount|AccountNotAllowed",
        "the account may not run here: correct slurm.account",
        never=True,
    ),
    ReasonRow("InvalidQOS|QOSNotAllowed", "the quality of service may not be used here: correct slurm.qos", never=True),
    ReasonRow(
        "(?:Assoc|QOS)Max.*PerJob.*|QOSMin.*",
        "the job is too large (or too small) for this account or qos: change nodes, slurm.time, mem or cpus",
        never=True,
    ),
    ReasonRow("(?:Assoc|QOS)Grp.*Minutes.*", "the budget of this account or qos is currently used up"),
    ReasonRow("(?:Assoc|QOS).*|MaxCpuPerAccount|MaxBB.*", "this account or qos is currently at its limit"),
    ReasonRow("JobArrayTaskLimit", "the limit of running array elements is reached"),
    ReasonRow("Licenses", "it waits for a licence"),
    ReasonRow("ReservationDeleted", "its reservation was deleted: correct slurm.reservation", never=True),
    ReasonRow("Reservation", "it waits for its reservation to begin"),
    ReasonRow(
        "ReqNodeNotAvail.*|Nodes.required.for.job.are.DOWN.*",
        "nodes that it needs are down, drained, reserved or in use",
    ),
    ReasonRow("NodeDown|FrontEndDown|PowerNotAvail.*", "a node that it needs is down"),
    ReasonRow("SystemFailure", "Slurm itself failed"),
    ReasonRow("DeadLine", "it cannot end before its deadline", never=True),
)
# If Slurm cannot open the output file of a job, it reports this number as the job's signal.
CANNOT_OPEN_OUTPUT: Final = 53
OUT_OF_MEMORY: Final = r"(?i)exceeded (?:job )?memory limit|oom[-_ ]kill|task \d+: out of memory|out of memory handler"
_BY_EXIT_CODE: Final = {
    126: "the interpreter{which} cannot be run on {where}; correct `interpreter` in the site file",
    127: "the interpreter{which} is not on {where}; correct `interpreter` in the site file",
}
# The messages of dash and bash if they cannot run a program.
_NOT_RUN: Final = (
    r"(?m)(?:exec: |line \d+: )(?P<program>/.*?): (?:not found|cannot execute|Permission denied|No such file)"
)


def waiting(job: JobState) -> str:
    """Return the reason why a job waits, as one line."""
    row, state = _reason_row(job), STATES.get(job.state)
    if job.state != "PENDING" and state is not None:
        return state.sentence.replace("{id}", job.job_id)
    if row is None:
        return f"it waits in the queue ({job.reason})" if job.reason else "it waits in the queue"
    sentence = row.sentence.replace("{id}", job.job_id)
    return sentence if job.reason in ("", "None") else f"{sentence} ({job.reason.replace('_', ' ')})"


def is_hopeless(job: JobState) -> bool:
    """Return True if Slurm's reason means that a waiting job will never start, unless nodes are repaired."""
    row = _reason_row(job)
    return job.phase == "pending" and row is not None and row.never


def is_orphan(job: JobState) -> bool:
    """Return True if a job continues without the node of its batch script.

    With --no-kill Slurm removes a failed node from the job and continues, even if the supervisor ran on that node. The
    other nodes would stay allocated but unused until the time limit.
    """
    # Jobs in COMPLETING are excluded, because Slurm then lists only the nodes that are not done yet.
    running = job.state in ("RUNNING", "SUSPENDED") and job.batch_host and job.nodes
    return bool(running) and job.batch_host not in expand(job.nodes)


def outcome(job: JobState, said: str = "") -> JobOutcome:
    """Return the exit code and message for a job that ended without a verdict; `said` is the end of its output."""
    if is_orphan(job):
        return JobOutcome(
            exits.UNREACHABLE, f"Slurm job {job.job_id}: {job.batch_host}, the node of its supervisor, failed"
        )
    row = STATES.get(job.state, STATES["FAILED"])
    if row.code is None and re.search(OUT_OF_MEMORY, said):  # Slurm reports some of these jobs as FAILED
        row = STATES["OUT_OF_MEMORY"]
    where = f"Slurm job {job.job_id}" + (f" on {job.nodes}" if job.nodes else "")
    if row.code is not None:
        return JobOutcome(row.code, f"{where}: {row.sentence} ({job.state})")
    if job.signal == CANNOT_OPEN_OUTPUT:
        return JobOutcome(
            exits.RUN_FOLDER,
            f"{where}: Slurm cannot write into the run folder there; put --runs on storage that all nodes share",
        )
    if job.signal:
        return JobOutcome(exits.SIGNAL_BASE + job.signal, f"{where}: its supervisor was killed by signal {job.signal}")
    code = job.exit_code or FAILED
    program = re.search(_NOT_RUN, said)
    sentence = _BY_EXIT_CODE.get(job.exit_code, "its supervisor left no verdict").format(
        which=f" {program['program']}" if program else "", where=job.batch_host or "the node"
    )
    reason = f", {job.reason}" if job.reason not in ("", "None", "NonZeroExitCode") else ""
    return JobOutcome(code, f"{where}: failed with code {job.exit_code}: {sentence} ({job.state}{reason})")


def never_began(job: JobState) -> bool:
    """Return True if a job is over because its batch script could not start the supervisor."""
    return job.phase == "over" and job.exit_code in _BY_EXIT_CODE


def _reason_row(job: JobState) -> ReasonRow | None:
    # scontrol writes spaces as underscores, and squeue adds the nodes after a comma.
    return next((row for row in REASONS if re.fullmatch(row.words, job.reason or "None")), None)
