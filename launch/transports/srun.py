"""The Slurm transport: one job step starts all agents. srun copies its input to every task, so agents dial back."""

import errno
import os
from collections.abc import Sequence
from typing import Final

from muster.jobs.basics.errors import MusterError, RefusedError, UnreachableError
from muster.jobs.hosts.placement import Host
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.transports.base import agent_argv
from muster.launch.transports.dialled import Dialled, Starter
from muster.launch.transports.ssh_command import explain, last_said
from muster.slurm.allocation import read_allocation
from muster.slurm.complaints import complaint
from muster.slurm.steps import srun_argv, step_environment

NOT_STARTED: Final = (errno.ENOENT, errno.EACCES, errno.ENOEXEC)


def is_of_a_node(line: str) -> bool:
    """Return whether a line printed by srun is a message about one node."""
    found = complaint([line])
    return found is not None and found.of_a_node


def srun_transport(nodes: Sequence[str], *, run: RunDir, python: str, code: str | None, alone: str = "") -> Dialled:
    """Return the Slurm transport for nodes of the allocation in which this process runs.

    `alone`: what agents do with the Slurm job when its supervisor is lost: `requeue` or `cancel`; "": nothing, because
    the job belongs to the user.

    Raises:
        RefusedError: if there is no allocation.
    """
    allocation = read_allocation(os.environ)

    def step(connect: str, slot: int | None) -> list[str]:
        hosts = nodes if slot is None else [nodes[slot]]
        agent = agent_argv(python, code, "--connect", connect)
        agent += ["--alone", alone] if alone else []
        return srun_argv(
            nodes=len(hosts),
            argv=[*agent, "--node", "slurm" if slot is None else str(slot)],
            cpus_per_task=allocation.cpus_per_task,
            gpus_per_node=allocation.gpus_per_node,
            hosts=hosts if len(hosts) < len(allocation.nodes) else (),
        )

    def told(name: str, code: int, errors: Sequence[str]) -> MusterError:
        if name and code in NOT_STARTED and not any("boot.py" in line for line in errors):
            why = os.strerror(code)  # slurmstepd exits with the errno of its execve, and its message may come later
            return RefusedError(f"{name}: {python} cannot be run there: {why}; correct `interpreter` in the site file")
        if name:
            return explain(Host(name, ""), code, errors)
        return UnreachableError(f"srun ended with code {code} before all agents had connected: {last_said(errors)}")

    return Dialled(
        "slurm",
        len(nodes),
        run=run,
        towards=nodes[-1],
        starter=Starter(
            argv=step,
            explain=told,
            replaces=step_environment(os.environ),
            prefix="srun: error: ",
            passes_on=is_of_a_node,  # launch/scheduler/slurm_output.py reads these lines in the batch output
            names={name: number for number, name in enumerate(nodes)},
        ),
    )
