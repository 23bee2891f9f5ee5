"""The Slurm transport: one step of agents inside an allocation. srun copies one input to all, so they dial back."""

import os
from collections.abc import Sequence

from jobs.boot import module_argv
from jobs.errors import MusterError, UnreachableError
from jobs.placement import Host
from jobs.rundir import RunDir
from launch.ssh_command import explain
from launch.transports.base import LEASE_S
from launch.transports.dialled import Dialled, Starter
from slurm.allocation import read_allocation
from slurm.steps import srun_argv, step_environment


def srun_transport(nodes: Sequence[str], *, run: RunDir, python: str, code: str | None, alone: str = "") -> Dialled:
    """Make the transport for nodes of the allocation that this process is in.

    `alone` says what agents do with the job when its supervisor is lost: `requeue` or `cancel`; "": it is not theirs.

    Raises:
        RefusedError: there is no allocation.
    """
    allocation = read_allocation(os.environ)

    def step(connect: str, hosts: Sequence[str], node: str) -> list[str]:
        agent = [*module_argv(python, "launch.agent", code), "--lease-s", str(LEASE_S), "--connect", connect]
        agent += ["--alone", alone] if alone else []
        return srun_argv(
            nodes=len(hosts),
            argv=[*agent, "--node", node],
            cpus_per_task=allocation.cpus_per_task,
            gpus_per_node=allocation.gpus_per_node,
            hosts=hosts if len(hosts) < len(allocation.nodes) else (),
        )

    def told(name: str, code: int, errors: Sequence[str]) -> MusterError:
        if name:
            return explain(Host(name, ""), code, errors)
        last = next((line for line in reversed(errors) if line.strip()), "it said nothing")
        return UnreachableError(f"srun ended with code {code} before all agents had come: {last}")

    return Dialled(
        "slurm",
        len(nodes),
        run=run,
        starter=Starter(
            argv=lambda connect: step(connect, nodes, "slurm"),
            one=lambda connect, slot: step(connect, [nodes[slot]], str(slot)),
            explain=told,
            replaces=step_environment(os.environ),
            prefix="srun: error: ",
            names={name: number for number, name in enumerate(nodes)},
        ),
    )
