"""Spare nodes, beyond those that a job computes on: each has an agent from the start and can replace a lost node. Pure.

place_crew(job, hosts)     nodes: 2, restart: {spares: 1}, hosts n01 n02 n03

    placement  n01 ranks 0-1   n02 ranks 2-3
    spares     n03, which would have ranks 4-5
"""

from collections.abc import Sequence
from dataclasses import replace

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.words import counted
from muster.jobs.hosts.placement import Host, NodePlacement, Placement, place
from muster.jobs.spec.job import Job


def spares_of(job: Job) -> int:
    """Return the number of spare nodes that a job asks for."""
    return job.restart.spares if job.restart is not None else 0


def crew_size(job: Job) -> int:
    """Return the number of nodes that get an agent."""
    return job.nodes + spares_of(job)


def place_crew(job: Job, hosts: Sequence[Host]) -> tuple[Placement, tuple[NodePlacement, ...]]:
    """Place a job's ranks on the first hosts, and keep the next ones as spares.

    All nodes, including spares, must be able to meet at one address.

    Raises:
        RefusedError: if there are too few hosts or slots, or the ranks could not meet at the address.
    """
    spares = spares_of(job)
    if not spares:
        return place(job, hosts), ()
    if len(hosts) < crew_size(job):
        raise RefusedError(
            f"restart.spares: job {job.name!r} needs {counted(job.nodes, 'node')} and {counted(spares, 'spare')}, "
            f"got {counted(len(hosts), 'host')}; add hosts, or lower nodes or restart.spares"
        )
    every = place(job.model_copy(update={"nodes": crew_size(job)}), hosts)
    nodes, others = every.nodes[: job.nodes], every.nodes[job.nodes :]
    return replace(every, nodes=nodes, world_size=others[0].first_rank), others
