"""Prepare a submission: load the job and site files, find the hosts, place the ranks, and check that they can run.

Nothing is started or written, so `muster plan` and `muster run` share this code.
"""

import ipaddress
import os
import socket
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from muster.jobs.basics.errors import RefusedError, UsageError
from muster.jobs.hosts.hosts import HostSet
from muster.jobs.hosts.nodelist import expand
from muster.jobs.hosts.placement import Host, divide
from muster.jobs.machine.network import is_own
from muster.jobs.runfolder.rundir import RunDir, run_path, runs_root
from muster.jobs.spec import yamlfile
from muster.jobs.spec.filled import fixed, with_fixed
from muster.jobs.spec.job import Job
from muster.jobs.spec.load import LoadedJob, load_job
from muster.jobs.spec.site import Site, placed
from muster.jobs.spec.slurm import merged
from muster.launch.common.host import visible_gpus
from muster.launch.common.kinds import BY_KEY, KINDS
from muster.launch.plan.interpreter import choose
from muster.launch.plan.plan import Context, NodeMachine, shared_environment
from muster.launch.plan.spares import nodes_with_spares, place_with_spares
from muster.launch.plan.submission import Route, Submission
from muster.launch.submit.here import check_files, check_program, check_size
from muster.launch.submit.hostsource import check_options, host_set, site_of
from muster.launch.submit.request import QUEUED, Request
from muster.slurm.allocation import inside_allocation, read_allocation

LOCAL_ADDRESS = "127.0.0.1"
OF_SITE = "site file: "  # prefix of messages about the site file


@dataclass(frozen=True)
class PreparedSubmission:
    """A submission, and the files to store in the run folder."""

    submission: Submission
    loaded: LoadedJob

    @property
    def context(self) -> Context:
        """The values that all nodes share."""
        return self.submission.context

    @property
    def route(self) -> Route:
        """The transport and the hosts."""
        return self.submission.route

    @property
    def site_text(self) -> str:
        """The site file, with the ssh settings of the command line."""
        return yamlfile.dump(self.context.site.model_dump(mode="json"))

    def changed(self, **changes: Any) -> "PreparedSubmission":
        """Return a copy with other values in the context."""
        return replace(self, submission=replace(self.submission, context=replace(self.context, **changes)))


def prepare(
    request: Request,
    *,
    here: bool = True,
    route: Route | None = None,
    resumed: RunDir | None = None,
    allow_unread: bool = False,
) -> PreparedSubmission:
    """Load, place and check a job. `here`: pretend nodes run on this machine, so its limits apply to them.

    `route`: the route of the `resumed` run, or None to derive it from the request. `allow_unread`: as for `load_job`.

    Raises:
        UsageError: if no job file is named, or options contradict each other.
        JobFileError: if the job, site or hosts file is invalid.
        RefusedError: if the hosts or the machine do not fit the job.
    """
    if not request.job:
        raise UsageError("JOB: is empty; name a job file, such as jobs/examples/hello.yaml")
    changes, text = request.changes(), request.job_text
    loaded = load_job(Path(request.job), KINDS, changes, text=text, allow_unread=allow_unread)
    site = site_of(request)
    route = route or route_of(request, site)
    check_options(request, route.transport)
    try:
        context = _context(request, loaded.job, site, route, here=here and route.is_here, resumed=resumed)
        if here and route.is_here and resumed is None:  # a resumed run uses its original working folder
            check_program(context)
    except RefusedError as error:
        message = str(error)
        if message.startswith(OF_SITE):
            raise RefusedError(placed(request.site, message.removeprefix(OF_SITE))) from error
        message = message.removeprefix("job file: ")
        if request.program:
            message = message.removeprefix("command: ")
        raise RefusedError(loaded.document.placed(message)) from error
    return PreparedSubmission(Submission(route, context), with_fixed(loaded, context.job))


def _context(request: Request, job: Job, site: Site, route: Route, *, here: bool, resumed: RunDir | None) -> Context:
    """Place a job, and check that it can run. `here`: it runs on this machine."""
    if here:
        check_size(job, len(this_machine().cores))
    hosts = pretend_nodes(job, this_machine()) if route.is_here else nodes_of(job, site, route)
    placement, spares = place_with_spares(job, hosts)
    job = fixed(job, placement.world_size, cores=len(this_machine().cores) if here else None, run=resumed)
    BY_KEY[job.kind].check(job.settings, placement.world_size)
    if here:
        data = {} if site.data is None else {"MUSTER_DATA": site.data}
        check_files(job, {**os.environ, **data, **site.env, **job.env})
    if address := request.master_addr:
        placement = placement.meeting_at(numeric(address))
        if route.is_here and not is_own(address):
            raise UsageError(
                f"--master-addr: {address} is not an address of this machine, where the job runs; leave it out"
            )
        if placement.one_host and len(placement.nodes) > 1 and route.transport not in ("local", "hand"):
            raise UsageError(
                f"--master-addr: {address} means a different machine on each node; give an address of node 0 that all "
                "nodes reach"
            )
    python = interpreter_of(site, here=route.is_here)
    context = Context(
        job=job,
        site=site,
        placement=placement,
        run=RunDir(run_path(runs_root(request.runs or site.runs), job.name)),
        workdir=job.workdir or str(Path.cwd()),
        python=python,
        entry=BY_KEY[job.kind].entry,
        code=site.code,
        remote=route.transport != "local",
        iface=route.iface,
        spares=spares,
        interpreter=choose(job, site, python),
    )
    shared_environment(context, this_machine(), 1)  # raises an error for variables that a job may not set
    return context


def route_of(request: Request, site: Site) -> Route:
    """Return the transport and its hosts.

    Raises:
        UsageError: if the transport needs hosts and none are named.
    """
    transport = request.on or ("ssh" if request.names_hosts or site.hosts else "local")
    if transport == "local":
        if request.names_hosts:
            raise UsageError("--on local: uses no hosts, but hosts are given; use --on ssh, or leave them out")
        return Route("local", HostSet((), "this machine"))
    if transport in QUEUED:  # Slurm chooses the hosts; a box only says which Slurm to use
        chosen = replace(request, nodelist=None, exclude=None)
        hosts = host_set(chosen, site) if chosen.names_hosts else None
    else:
        hosts = host_set(request, site)
    if hosts is None and transport in ("ssh", "pdsh"):
        raise UsageError(
            f"--on {transport}: no hosts; give -H FILE, -w 'n[01-04]', --manifest FILE, --hosts box, or hosts: in the "
            "site file"
        )
    return Route(
        transport=transport,
        hosts=hosts or HostSet((), transport),
        fanout=request.fanout,
        port=request.port,
        iface=request.iface or site.iface,
    )


def nodes_of(job: Job, site: Site, route: Route) -> list[Host]:
    """Return the hosts that a job may use. Outside an allocation, only the number of Slurm's nodes is known."""
    if route.transport == "hand" and not route.hosts.hosts:
        return [Host(f"node{number}", "") for number in range(nodes_with_spares(job))]
    if route.transport not in QUEUED:
        return list(route.hosts.hosts)
    if route.transport == "slurm" and inside_allocation(os.environ):
        return allocated(job)
    asked = merged(site.slurm, job.slurm)
    gpus = str(asked.gpus_per_node or "").rpartition(":")[2]
    slots = int(gpus) if gpus else asked.cpus_per_task
    return [Host(f"slurm-{number}", "", slots=slots) for number in range(nodes_with_spares(job))]


def allocated(job: Job) -> list[Host]:
    """Return the nodes of the current allocation. The number of cores limits a job only if it asks for slots."""
    # if Muster submitted the job, Slurm has excluded these nodes already
    left_out = set(expand(job.slurm.exclude)) if job.slurm.exclude else set()
    hosts = [host for host in read_allocation(os.environ).hosts() if host.name not in left_out]
    return [host if job.ranks_per_node == "slots" else replace(host, slots=None) for host in hosts]


def numeric(address: str) -> str:
    """Return a numeric address, which means the same on every node.

    Raises:
        UsageError: if the address is a host name.
    """
    try:
        return str(ipaddress.IPv4Address(address))
    except ValueError:
        raise UsageError(f"--master-addr: must be an IPv4 address, such as 10.10.1.1, got {address!r}") from None


def pretend_nodes(job: Job, machine: NodeMachine) -> list[Host]:
    """Return this machine as several hosts, which divide its GPUs or, without GPUs, its cores.

    Slots are set only for a job that asks for them, so other jobs may have more ranks than this machine has cores.
    """
    if job.ranks_per_node != "slots":
        return [Host(machine.host, LOCAL_ADDRESS)] * nodes_with_spares(job)
    shares = divide(machine.gpus or machine.cores, nodes_with_spares(job))
    return [Host(machine.host, LOCAL_ADDRESS, slots=len(share)) for share in shares]


def interpreter_of(site: Site, *, here: bool = True) -> str:
    """Return the Python that runs agents and ranks: the site's, or else this one. `here`: it will run on this machine.

    Raises:
        RefusedError: if the site's Python cannot be run here.
    """
    if site.interpreter is None:
        return sys.executable
    if here and not os.access(site.interpreter, os.X_OK):
        raise RefusedError(f"site file: interpreter: {site.interpreter}: cannot be run here; correct it, or remove it")
    return site.interpreter


def this_machine() -> NodeMachine:
    """Describe this machine as an agent would."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return NodeMachine(socket.gethostname(), cores, tuple(visible_gpus()), environ=os.environ)
