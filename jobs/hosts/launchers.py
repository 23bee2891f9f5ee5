"""The variables that mpirun and srun set for the processes they start, as read by `jobs/hosts/detect.py`.

Sources: the manual pages of srun and sbatch; Open MPI 5.0's documentation of `OMPI_COMM_WORLD_*`; observed variables
for MPICH's Hydra, MVAPICH2 and Cray PALS.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from muster.jobs.basics.errors import RefusedError
from muster.jobs.hosts.nodelist import expand
from muster.jobs.hosts.ranks import PASS_FLAGS, RankEnv, number


@dataclass(frozen=True)
class Found:
    """A rank whose master is not known yet, its launcher, and the variable that each number came from."""

    launcher: str
    env: RankEnv
    origins: dict[str, str]
    first_node: str = ""
    first_node_origin: str = ""


@dataclass(frozen=True)
class MpiRow:
    """The variables of one MPI launcher."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str


def _row(launcher: str, prefix: str) -> MpiRow:
    return MpiRow(launcher, f"{prefix}RANK", f"{prefix}SIZE", f"{prefix}LOCAL_RANK", f"{prefix}LOCAL_SIZE")


MPI_ROWS: Final = (
    _row("openmpi", "OMPI_COMM_WORLD_"),
    _row("mvapich2", "MV2_COMM_WORLD_"),
    _row("pals", "PMI_"),
    MpiRow("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# PMI and PMIx launchers set these, some without setting everything that a rank needs.
MPI_HINTS: Final = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")

STEP_ID: Final = ("SLURM_STEP_ID", "SLURM_STEPID")
STEP_TASKS: Final = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
STEP_NODES: Final = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
STEP_TASKS_PER_NODE: Final = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
STEP_NODELIST: Final = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
DISTRIBUTION: Final = "SLURM_DISTRIBUTION"
# Slurm reserves larger step numbers for its own steps: the batch script (4294967291), extern, interactive.
FIRST_SPECIAL_STEP: Final = 0xFFFFFFF0

SLURM_VARIABLES: Final = (
    *STEP_ID,
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    *STEP_TASKS,
    *STEP_NODES,
    *STEP_TASKS_PER_NODE,
    *STEP_NODELIST,
    DISTRIBUTION,
)


def read_mpi(environ: Mapping[str, str]) -> Found | None:
    """Read the rank that an MPI launcher assigned; return None without an MPI launcher.

    Raises:
        RefusedError: if an MPI launcher started this process but did not set enough variables.
    """
    for row in MPI_ROWS:
        if all(name in environ for name in (row.rank, row.size, row.local_rank, row.local_size)):
            return _read_row(environ, row)
    hint = next((name for name in MPI_HINTS if name in environ), None)
    if hint is None or in_step(environ):  # with srun --mpi=pmi2 or pmix, Slurm's own variables have the missing numbers
        return None
    raise RefusedError(
        f"environment: {hint}={environ[hint]} is set, but not the number of ranks on this node and in total; "
        f"{PASS_FLAGS}"
    )


def _read_row(environ: Mapping[str, str], row: MpiRow) -> Found:
    """Read one launcher's variables. MPI sets no node index, so equal blocks of ranks on all nodes are assumed."""
    rank, size = number(environ, row.rank), number(environ, row.size)
    local_rank, local_size = number(environ, row.local_rank), max(1, number(environ, row.local_size))
    nodes = -(-size // local_size)
    env = RankEnv(rank, size, local_rank, local_size, node_rank=min(rank // local_size, nodes - 1), nodes=nodes)
    origins = {
        "rank": row.rank,
        "world_size": row.size,
        "local_rank": row.local_rank,
        "local_world_size": row.local_size,
        "node_rank": f"{row.rank} // {row.local_size}",
        "nodes": f"{row.size} / {row.local_size}",
    }
    return Found(row.launcher, env, origins)


def in_step(environ: Mapping[str, str]) -> bool:
    """Return True if srun started this process, which then has a numbered step and a rank in it."""
    step = environ.get(_first(environ, STEP_ID), "")
    return step.isdecimal() and int(step) < FIRST_SPECIAL_STEP and "SLURM_PROCID" in environ


def read_step(environ: Mapping[str, str]) -> Found | None:
    """Read the rank that srun assigned; return None outside a step.

    Raises:
        RefusedError: if the step's variables are incomplete or contradict each other.
    """
    if not in_step(environ):
        return None
    tasks_name, nodes_name = _first(environ, STEP_TASKS), _first(environ, STEP_NODES)
    rank, size = number(environ, "SLURM_PROCID"), number(environ, tasks_name)
    nodes = number(environ, nodes_name) if nodes_name in environ else 1
    node_rank = number(environ, "SLURM_NODEID") if nodes > 1 else 0
    local_size, local_size_origin = _tasks_here(environ, size, nodes, node_rank)
    env = RankEnv(rank, size, number(environ, "SLURM_LOCALID"), local_size, node_rank=node_rank, nodes=nodes)
    origins = {
        "rank": "SLURM_PROCID",
        "world_size": tasks_name,
        "local_rank": "SLURM_LOCALID",
        "local_world_size": local_size_origin,
        "node_rank": "SLURM_NODEID" if nodes > 1 else "default",
        "nodes": nodes_name if nodes_name in environ else "default",
    }
    nodelist = _first(environ, STEP_NODELIST)
    first_node = "" if _is_arbitrary(environ) or nodelist not in environ else expand(environ[nodelist])[0]
    return Found("slurm", env, origins, first_node, nodelist)


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's run lengths: `2(x3),1` is 2, 2, 2, 1.

    Raises:
        RefusedError: if the text has another form.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", item.strip())
        if match is None:
            raise RefusedError(f"environment: tasks per node must be of the form 2(x3),1, got {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _tasks_here(environ: Mapping[str, str], size: int, nodes: int, node_rank: int) -> tuple[int, str]:
    """Return the number of the step's tasks on this node, and its origin."""
    if nodes == 1:
        return size, "the step's one node"
    for name in STEP_TASKS_PER_NODE:
        # The second variable may describe the whole allocation. If the step uses only a part, the sum is not `size`.
        if name in environ and len(counts := tasks_per_node(environ[name])) == nodes and sum(counts) == size:
            if node_rank >= nodes:
                break
            return counts[node_rank], name
    if size % nodes == 0 and node_rank < nodes:
        return size // nodes, "tasks / nodes"
    raise RefusedError(
        f"environment: {size} tasks on {nodes} nodes, but no variable has the number of tasks on node {node_rank}; "
        f"{PASS_FLAGS}"
    )


def _is_arbitrary(environ: Mapping[str, str]) -> bool:
    """Return True with --distribution=arbitrary: the first task may then be on any node of the list."""
    return environ.get(DISTRIBUTION, "").startswith("arbitrary")


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((name for name in names if name in environ), names[0])
