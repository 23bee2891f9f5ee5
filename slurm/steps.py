"""Build srun's argv for the job step that runs one agent on each node. Pure.

The end of one agent or node does not end the step (--kill-on-bad-exit=0, --wait=0, --no-kill), because the supervisor
decides how to continue. User data is not passed in --export, but over the control channel.
"""

from collections.abc import Mapping, Sequence
from typing import Final

# Variables, set by an enclosing srun or by the user, that would affect the agents' step.
_CHANGING: Final = (
    *("SLURM_CPU_BIND", "SLURM_MEM_BIND", "SLURM_DISTRIBUTION", "SLURM_DIST_", "SLURM_HOSTFILE", "SLURM_ARBITRARY"),
    *("SLURM_LABELIO", "SLURM_MULTI", "SLURM_UNBUFFEREDIO", "SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_IMMEDIATE", "SLURM_TIMELIMIT"),
    *("SLURM_GPUS_PER_TASK", "SLURM_OPEN_MODE", "SLURM_REMOTE_CWD", "SLURM_STEP_", "SLURM_STEPID", "SLURM_THREADS"),
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_TASK_PROLOG", "SLURM_TASK_EPILOG"),
)


def srun_argv(
    *,
    nodes: int,
    argv: Sequence[str],
    cpus_per_task: int | None = None,
    gpus_per_node: int | str | None = None,
    hosts: Sequence[str] = (),
) -> list[str]:
    """Return the command that starts one agent on each of `nodes` nodes of the allocation.

    `cpus_per_task` is repeated here, because srun does not inherit it from the job. Without it, an agent would have one
    core. `hosts` names the nodes if only a part of the allocation is used.
    """
    optional = {"cpus-per-task": cpus_per_task, "gpus-per-node": gpus_per_node, "nodelist": ",".join(hosts) or None}
    return [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--overlap",
        "--input=none",
        "--export=ALL",
        *(f"--{name}={value}" for name, value in optional.items() if value is not None),
        *argv,
    ]


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return srun's environment, without variables that would affect the agents' step."""
    return {name: value for name, value in environ.items() if not name.startswith(_CHANGING)}
