"""A table of functions that each make one kind of transport from a submission."""

from collections.abc import Callable
from typing import Final

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.errors import RefusedError
from muster.jobs.hosts.placement import Host
from muster.jobs.spec.slurm import merged
from muster.launch.plan.submission import Submission
from muster.launch.transports.base import Transport
from muster.launch.transports.dialled import Dialled
from muster.launch.transports.local import Local
from muster.launch.transports.pdsh import pdsh_transport
from muster.launch.transports.srun import srun_transport
from muster.launch.transports.ssh import Ssh
from muster.launch.transports.submitit import Submitit


def commands_of(submission: Submission) -> list[list[str]]:
    """Return the command lines that would start the agents."""
    if submission.route.is_queued:
        return [["sbatch", str(submission.context.run.sbatch)]]
    return make_transport(submission).commands()


def make_transport(submission: Submission) -> Transport:
    """Make the transport of a submission.

    Raises:
        RefusedError: if the transport cannot be used here.
    """
    row = ROWS.get(submission.route.transport)
    if row is None:
        raise RefusedError(f"transport: must be one of {', '.join(ROWS)}, got {submission.route.transport!r}")
    return row(submission)


def _local(submission: Submission) -> Transport:
    return Local(len(submission.context.run_nodes), python=submission.context.python)


def _ssh(submission: Submission) -> Transport:
    context, route = submission.context, submission.route
    ssh = context.site.ssh
    return Ssh(_hosts(submission), route.hosts, ssh, python=context.python, code=context.code, fanout=route.fanout)


def _pdsh(submission: Submission) -> Transport:
    context, route = submission.context, submission.route
    return pdsh_transport(
        _hosts(submission),
        route.hosts,
        context.site.ssh,
        run=context.run,
        python=context.python,
        code=context.code,
        fanout=route.fanout,
    )


def _slurm(submission: Submission) -> Transport:
    context = submission.context
    nodes = [node.host for node in context.run_nodes]
    alone = ""
    if context.run.sbatch.exists():  # the Slurm job was submitted for this run, so it is not the user's own allocation
        alone = "requeue" if merged(context.site.slurm, context.job.slurm).requeue else "cancel"
    return srun_transport(nodes, run=context.run, python=context.python, code=context.code, alone=alone)


def _hand(submission: Submission) -> Transport:
    context, route = submission.context, submission.route
    return Dialled(
        "hand",
        len(context.run_nodes),
        run=context.run,
        starter=None,
        listen="127.0.0.1" if context.placement.one_host else context.placement.master_addr,
        port=route.port,
        secret=route.secret,
        attempt=context.attempt,
        own_agent=[*module_argv(context.python, "muster.launch.agent", context.code), "--node", "0"],
        patience_s=HAND_S,
    )


def _submitit(submission: Submission) -> Transport:
    context = submission.context
    nodes = [node.host for node in context.run_nodes]
    return Submitit(nodes, run=context.run, python=context.python, code=context.code)


def _hosts(submission: Submission) -> list[Host]:
    """Return the hosts of the run's nodes, in the order of their slots."""
    by_name = {host.name: host for host in submission.route.hosts.hosts}
    return [by_name[node.host] for node in submission.context.run_nodes]


HAND_S: Final = 600.0  # time to paste the lines
ROWS: Final[dict[str, Callable[[Submission], Transport]]] = {
    "local": _local,
    "ssh": _ssh,
    "pdsh": _pdsh,
    "slurm": _slurm,
    "hand": _hand,
    "submitit": _submitit,
}
