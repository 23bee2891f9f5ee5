"""Translate sbatch's error messages into Muster's, with the settings to check and advice. One table.

The patterns match texts of `slurm_strerror` and of sbatch's option parser (22.05; other versions have the same texts).
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from muster.jobs.basics.errors import MusterError, RefusedError, UnreachableError

if TYPE_CHECKING:
    from muster.jobs.spec.slurm import SlurmSettings  # agents import this, too, and their Python may lack pydantic


@dataclass(frozen=True)
class Refusal:
    """One row: a pattern of sbatch's message, the settings to check (of slurm:, or the job's `nodes`), and advice."""

    said: str
    settings: tuple[str, ...]
    advice: str


REFUSALS: Final[tuple[Refusal, ...]] = (
    Refusal("(?i)invalid partition", ("partition",), "name one of the partitions"),
    Refusal("No partition specified or system default", ("partition",), "name one of the partitions"),
    Refusal(
        "group not permitted to use this partition", ("partition",), "choose another partition, or ask for access to it"
    ),
    Refusal(
        r"partition not available \(inactive or drain\)|Partition in DOWN", ("partition",), "choose another partition"
    ),
    Refusal("nodes not in this partition", ("nodelist", "partition"), "name nodes of that partition"),
    Refusal(
        "Invalid account",
        ("account", "partition"),
        "name an account that you have (sacctmgr show associations user=$USER)",
    ),
    Refusal("(?i)invalid qos", ("qos",), "name a qos that your account has (sacctmgr show associations user=$USER)"),
    Refusal(
        "violates accounting/QOS policy",
        ("qos", "account", "nodes", "time", "mem"),
        "request less, or wait until your other jobs have ended",
    ),
    Refusal("(?i)time limit|Invalid --time", ("time", "partition"), "give a limit that the partition allows"),
    Refusal(
        "node configuration is not available",
        ("nodes", "cpus_per_task", "mem", "gpus_per_node", "constraint", "partition"),
        "request no more than the partition's nodes have",
    ),
    Refusal(
        "Node count specification invalid|More processors requested|Invalid node count|More nodes requested",
        ("nodes", "cpus_per_task", "partition"),
        "request no more than the partition has",
    ),
    Refusal("(?i)memory", ("mem",), "request no more than one node has"),
    Refusal("CPU count|(?i:cpu count per node)", ("cpus_per_task",), "request no more than one node has"),
    Refusal(r"(?i)\(gres\) specification|GRES", ("gpus_per_node", "extra"), "request GPUs that the nodes have"),
    Refusal("(?i)invalid feature|constraint", ("constraint",), "use features that the nodes have (sinfo -o '%N %f')"),
    Refusal("(?i)reservation", ("reservation",), "name a reservation that you may use now (scontrol show reservation)"),
    Refusal("Invalid node name", ("nodelist", "exclude"), "name nodes of this cluster (sinfo -N)"),
    Refusal("Required node not available", ("nodelist",), "name only nodes that are up (sinfo -N)"),
    Refusal("(?i)dependency", ("extra",), "depend on an existing job"),
    Refusal("unrecognized option|requires an argument|invalid option|ambiguous", ("extra",), "see sbatch --help"),
    Refusal("(?i)array", ("array",), "run fewer points in one sweep (MaxArraySize in scontrol show config)"),
    Refusal("Access/permission denied", (), "ask the cluster's administrators whether you may submit jobs here"),
)
# Messages about an unreachable controller, which say nothing about the job.
UNREACHABLE: Final = (
    r"(?i)unable to contact slurm controller|connect failure|timed out|Zero Bytes|communication|"
    r"authentication|munge|standby|try again|temporarily unable|backup controller"
)
_WHOLE: Final = "^(?:Batch job submission failed|Unable to allocate resources): "
_HINT: Final = "Try |warning: |If munged is up"
NOT_SET_UP: Final = r"(?i)configuration source|Unable to open slurm.conf|Unable to process configuration"


def refusal(said: str, settings: "SlurmSettings", nodes: int, *, partitions: str = "") -> MusterError:
    """Return the error for sbatch's refusal; `partitions` describes the available partitions."""
    line = essence(said)
    if re.search(NOT_SET_UP, said):
        return not_set_up(said)
    if re.search(UNREACHABLE, line):
        return UnreachableError(f"slurm: sbatch says: {line}; nothing was submitted: try again, or see scontrol ping")
    row = next((row for row in REFUSALS if re.search(row.said, line)), None)
    if row is None:
        return RefusedError(f"slurm: sbatch says: {line}; correct the slurm: section, or see the batch script")
    values = {"nodes": nodes, "array": None, **settings.model_dump()}
    where = " and ".join(_spelt(name) for name in _named(row, values)) or "slurm"
    given = [(name, _shown(values[name])) for name in row.settings if values.get(name)]
    found = ", ".join(f"{_spelt(name)}: {value}" for name, value in given if value not in line)
    has = f"; available: {partitions}" if partitions else ""
    return RefusedError(f"{where}: sbatch says: {line}{f' ({found})' if found else ''}; {row.advice}{has}")


def not_set_up(said: str) -> RefusedError:
    """Return the error for a machine on which Slurm is not set up; `said` is the message of a Slurm command."""
    why = _lines(said)[-1] if _lines(said) else "no reason given"
    return RefusedError(
        f"slurm: this machine belongs to no Slurm cluster ({why}); run this on a login node, or set SLURM_CONF"
    )


def essence(said: str) -> str:
    """Return the most informative line of Slurm's error message, without the program's name.

    If there are two lines, the first names the option, and the last is general: "Batch job submission failed".
    """
    lines = _lines(said)
    return next((line for line in lines if not re.match(_HINT, line)), lines[-1] if lines else "(no message)")


def _lines(said: str) -> list[str]:
    """Return the lines of an error without the program's name."""
    lines = [re.sub(r"^(?:\w+: )?(?:error: |fatal: )?", "", line.strip()) for line in said.splitlines()]
    return [re.sub(_WHOLE, "", line) for line in lines if line]


def _named(row: Refusal, values: dict[str, object]) -> list[str]:
    """Return the settings to check: those of the row that the job sets, else the row's first setting."""
    return [name for name in row.settings if values.get(name)] or list(row.settings[:1])


def _spelt(name: str) -> str:
    return name if name in ("nodes", "array") else f"slurm.{name}"


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
