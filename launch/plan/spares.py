"""Spare nodes, which run an agent but no ranks until they replace a lost node. Pure.

place_with_spares(job, hosts)     nodes: 2, restart: {spares: 1}, hosts n01 n02 n03

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


def nodes_with_spares(job: Job) -> int:
    """Return the number of nodes that get an agent."""
    return job.nodes + spares_of(job)


def place_with_spares(job: Job, hosts: Sequence[Host]) -> tuple[Placement, tuple[NodePlacement, ...]]:
    """Place a job's ranks on the first hosts, and keep the next ones as spares.

    All nodes, including spares, must be able to reach the same master address.

    Raises:
        RefusedError: if there are too few hosts or slots, or the nodes share no master address.
    """
    spares = spares_of(job)
    if not spares:
        return place(job, hosts), ()
    if len(hosts) < nodes_with_spares(job):
        raise RefusedError(
            f"restart.spares: job {job.name!r} needs {counted(job.nodes, 'node')} and {counted(spares, 'spare')}, "
            f"got {counted(len(hosts), 'host')}; add hosts, or lower nodes or restart.spares"
        )
    every = place(job.model_copy(update={"nodes": nodes_with_spares(job)}), hosts)
    nodes, others = every.nodes[: job.nodes], every.nodes[job.nodes :]
    return replace(every, nodes=nodes, world_size=others[0].first_rank), others
