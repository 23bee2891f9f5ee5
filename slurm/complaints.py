"""Find in Slurm's output the reason why it ended a step or job, for a supervisor that loses all agents at once. Pure.

Slurm signals all processes of a job at the same time, so the supervisor loses its agents before it can know the reason.
slurmstepd prints the reason to the output of the batch script and to srun's standard error.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from muster.jobs.basics import exits
from muster.slurm.states import FAILED, OUT_OF_MEMORY


@dataclass(frozen=True)
class Complaint:
    """A reason why Slurm ended a step or job, and the exit code of a run that ends because of it.

    `again` is True if Slurm itself requeues the job. `of_a_node` is True if the reason affects one node or rank, not
    the whole job.
    """

    code: int
    message: str
    again: bool = False
    of_a_node: bool = False
    host: str = ""  # the name of the node, if the message contains it


# The rows are in order of importance: if several rows match, the first one is the cause.
COMPLAINTS: Final = (
    (
        OUT_OF_MEMORY,
        Complaint(
            FAILED,
            "killed by Slurm because it ran out of memory; raise slurm.mem, or put fewer ranks on a node",
            of_a_node=True,
        ),
    ),
    (
        r"CANCELLED AT .* DUE TO TIME LIMIT",
        Complaint(exits.TIMEOUT, "it reached its time limit; raise slurm.time"),
    ),
    (
        r"CANCELLED AT .* DUE TO JOB REQUEUE",
        Complaint(exits.STOPPED, "stopped by Slurm, which queues the job again", again=True),
    ),
    (
        r"CANCELLED AT .* DUE TO PREEMPTION",
        Complaint(exits.INFRASTRUCTURE, "stopped by Slurm, which gives the nodes to another job", again=True),
    ),
    (
        r"CANCELLED AT .* DUE TO NODE FAILURE|srun: error: Node failure on",
        Complaint(exits.UNREACHABLE, "Slurm reports that one of the job's nodes failed"),
    ),
    (r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT", Complaint(exits.STOPPED, "stopped by scancel")),
)


# Find the node that ran out of memory, and the used and allowed bytes if Slurm reports them. The general message that a
# job ran out of memory is not matched: the batch script's node prints it, whichever node ran out of memory.
OUT_OF_MEMORY_AT: Final = (
    r"slurmstepd-(?P<host>[\w.-]+): error: (?:Step\S*|StepId=\S+)(?: \S+)? exceeded memory limit"
    r"(?: \((?P<used>\d{1,18}) > (?P<limit>\d{1,18})\))?|"
    r"slurmstepd-(?P<of>[\w.-]+): error: Detected \d+ oom|"
    r"srun: error: (?P<task>[\w.-]+): tasks? [\d,-]+: Out Of Memory"
)
LONGEST: Final = 4096


def complaint(lines: Iterable[str]) -> Complaint | None:
    """Return why Slurm ended the step or job that printed these lines; None if the lines do not give a reason."""
    kept = [line[:LONGEST] for line in lines]  # ranks may print lines of any length
    found = [index for line in kept for index, (said, _) in enumerate(COMPLAINTS) if re.search(said, line)]
    if not found:
        return None
    worst = COMPLAINTS[min(found)][1]
    where = next(filter(None, (re.search(OUT_OF_MEMORY_AT, line) for line in kept)), None)
    if where is None or not worst.of_a_node:
        return worst
    message = worst.message
    if where["limit"]:  # given in MB, as in slurm.mem
        used, limit = (f"{int(where[name]) >> 20}M" for name in ("used", "limit"))
        message = message.replace(";", f" ({used} used, {limit} allowed);", 1)
    return replace(worst, message=message, host=next(filter(None, where.groups())))
