"""The Slurm allocation of this process: its nodes, their cores, and its end time.

The batch script and all its child processes have the variables of the allocation. Variables with the index of a node
are not used, because they are 0 in the batch script.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from muster.jobs.basics.errors import RefusedError
from muster.jobs.hosts.launchers import tasks_per_node
from muster.jobs.hosts.nodelist import expand
from muster.jobs.hosts.placement import Host
from muster.jobs.hosts.ranks import OF_A_RANK, PASS_FLAGS, number

JOB_ID: Final = ("SLURM_JOB_ID", "SLURM_JOBID")
NODELIST: Final = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
NUM_NODES: Final = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")

# Variables that a job must not pass on to a job that it submits.
_OF_AN_MPI: Final = ("PMI_", "PMIX_", "OMPI_", "MV2_", "MPI_LOCAL", "HYDI_")
_OF_THE_JOB: Final = ("SLURM", "SRUN_", "SBATCH_MEM_BIND", "TORCHELASTIC_", *_OF_AN_MPI)
_OF_THE_CLUSTER: Final = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
_OF_THE_GPUS: Final = frozenset({"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"})


@dataclass(frozen=True)
class Allocation:
    """The nodes of a job, in Slurm's order, with the cores allocated on each; `end_time` is in unix seconds."""

    job_id: str
    nodes: tuple[str, ...]
    cpus: tuple[int, ...]
    end_time: float | None = None
    restarts: int = 0
    array_job_id: str | None = None
    array_task_id: int | None = None
    gpus_per_node: str | None = None

    @property
    def cpus_per_task(self) -> int:
        """The number of cores that one agent per node can request on every node."""
        return min(self.cpus)

    @property
    def requeue_id(self) -> str:
        """The id of this job for `scontrol requeue`; for an element of an array, ARRAYJOB_ELEMENT."""
        return self.job_id if self.array_job_id is None else f"{self.array_job_id}_{self.array_task_id}"

    def hosts(self) -> tuple[Host, ...]:
        """Return the nodes as hosts with a slot for each core. The agents report the hosts' addresses later."""
        return tuple(Host(name, "", slots=cpus) for name, cpus in zip(self.nodes, self.cpus, strict=True))


def inside_allocation(environ: Mapping[str, str]) -> bool:
    """Return True if this process runs in a Slurm job with nodes."""
    return _first(environ, JOB_ID) in environ and _first(environ, NODELIST) in environ


def read_allocation(environ: Mapping[str, str]) -> Allocation:
    """Read the allocation of this process from the environment.

    Raises:
        RefusedError: if there is no allocation, or its variables contradict each other.
    """
    if not inside_allocation(environ):
        raise RefusedError(
            "environment: this process is in no Slurm allocation (SLURM_JOB_ID and SLURM_JOB_NODELIST are not set); "
            "run this in a job: sbatch, salloc, or muster submit --on slurm"
        )
    nodelist = _first(environ, NODELIST)
    nodes = tuple(expand(environ[nodelist]))
    count = _first(environ, NUM_NODES)
    if count in environ and number(environ, count) != len(nodes):
        raise RefusedError(
            f"environment: {nodelist}={environ[nodelist]} has {len(nodes)} nodes, but {count} is {environ[count]}; "
            "one of them comes from another job: unset it, or start in a new job"
        )
    array = environ.get("SLURM_ARRAY_JOB_ID")
    return Allocation(
        job_id=environ[_first(environ, JOB_ID)],
        nodes=nodes,
        cpus=_cpus(environ, len(nodes)),
        end_time=float(number(environ, "SLURM_JOB_END_TIME")) if "SLURM_JOB_END_TIME" in environ else None,
        restarts=number(environ, "SLURM_RESTART_COUNT") if "SLURM_RESTART_COUNT" in environ else 0,
        array_job_id=array,
        array_task_id=number(environ, "SLURM_ARRAY_TASK_ID") if array is not None else None,
        gpus_per_node=environ.get("SLURM_GPUS_PER_NODE"),
    )


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for submitting a job: without rank or job variables, but with the user's SBATCH_*.

    If it had the variables of a rank, every rank of the new job would use that rank's number.
    """
    drop_gpus = any(name in environ for name in ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS"))
    return {
        name: value
        for name, value in environ.items()
        if name in _OF_THE_CLUSTER
        or not (name.startswith(_OF_THE_JOB) or name in OF_A_RANK or (drop_gpus and name in _OF_THE_GPUS))
    }


def _cpus(environ: Mapping[str, str], nodes: int) -> tuple[int, ...]:
    """Return the number of cores of each node.

    If the number is known only for this node, assume the same number for all nodes.
    """
    if "SLURM_JOB_CPUS_PER_NODE" in environ:
        cpus = tasks_per_node(environ["SLURM_JOB_CPUS_PER_NODE"])
        if len(cpus) == nodes:
            return tuple(cpus)
        raise RefusedError(
            f"environment: SLURM_JOB_CPUS_PER_NODE={environ['SLURM_JOB_CPUS_PER_NODE']} is for {len(cpus)} nodes, "
            f"but the job has {nodes}; {PASS_FLAGS}"
        )
    if "SLURM_CPUS_ON_NODE" in environ:
        return (number(environ, "SLURM_CPUS_ON_NODE"),) * nodes
    return (1,) * nodes


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((name for name in names if name in environ), names[0])
