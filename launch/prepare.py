"""From the command line to a context: load the job and the site, place the ranks, check what can be checked here.

Nothing is started and nothing is written, so that `muster plan` and `muster run` share it to the end.
"""

import argparse
import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from jobs.datafiles import cifar10_files, data_root, text_file
from jobs.errors import RefusedError, UsageError
from jobs.load import load_job
from jobs.placement import Host, divide, place
from jobs.rundir import RunDir, run_path, runs_root
from jobs.site import Site, load_site
from jobs.spec import Job, TrainSettings
from launch.kinds import BY_KEY, KINDS
from launch.plan import Context, Machine

LOCAL_ADDRESS = "127.0.0.1"
LOCAL_NODES = 256  # each is an agent and a warm process
LOCAL_RANKS = 1024


@dataclass(frozen=True)
class Prepared:
    """A context, and the texts that the run folder keeps."""

    context: Context
    job_text: str
    site_text: str


def prepare(args: argparse.Namespace, *, here: bool = True) -> Prepared:
    """Load, place and check a job; `here` says that its nodes are pretend nodes of this machine, which then has limits.

    Raises:
        UsageError: no job file is named.
        JobFileError: the job or site file is wrong.
        RefusedError: job and machine do not fit together.
    """
    if not args.job:
        raise UsageError("JOB: is empty; name a job file, such as jobs/examples/hello.yaml")
    name = [] if args.name is None else [f"name={json.dumps(args.name)}"]
    loaded = load_job(Path(args.job), KINDS, [*args.overrides, *name])
    job = loaded.job
    site = load_site(args.site)
    try:
        if here:
            check_size(job)
        placement = place(job, pretend_nodes(job, this_machine()))
        BY_KEY[job.kind].check(job.settings, placement.world_size)
        if here:
            check_files(job, {**os.environ, **data_of(site), **site.env, **job.env})
    except RefusedError as error:
        raise RefusedError(f"{args.job}: {error}") from error
    run = RunDir(run_path(runs_root(args.runs or site.runs), job.name))
    context = Context(
        job=job,
        site=site,
        placement=placement,
        run=run,
        workdir=job.workdir or str(Path.cwd()),
        python=interpreter_of(site),
        entry=BY_KEY[job.kind].entry,
    )
    site_text = yaml.safe_dump(site.model_dump(mode="json"), sort_keys=False)
    return Prepared(context, loaded.text, site_text)


def pretend_nodes(job: Job, machine: Machine) -> list[Host]:
    """Return this machine as many hosts; they divide its GPUs, or else its cores.

    On one's own machine more ranks than cores are welcome: slots count only for a job that asks for them.
    """
    if job.ranks_per_node != "slots":
        return [Host(machine.host, LOCAL_ADDRESS)] * job.nodes
    shares = divide(machine.gpus or machine.cores, job.nodes)
    return [Host(machine.host, LOCAL_ADDRESS, slots=len(share)) for share in shares]


def data_of(site: Site) -> dict[str, str]:
    """Return the variable that stands for the site's folder of data sets."""
    return {} if site.data is None else {"MUSTER_DATA": site.data}


def interpreter_of(site: Site) -> str:
    """Return the Python that agents and ranks run: the site's, else this one.

    Raises:
        RefusedError: the site's cannot be run here.
    """
    if site.interpreter is None:
        return sys.executable
    if not os.access(site.interpreter, os.X_OK):
        raise RefusedError(f"site file: interpreter: {site.interpreter}: cannot be run here; correct it, or remove it")
    return site.interpreter


def check_size(job: Job) -> None:
    """Refuse what would only bring this machine to its knees.

    Raises:
        RefusedError: more pretend nodes or ranks than one machine is for.
    """
    ranks = job.nodes * (1 if job.ranks_per_node == "slots" else job.ranks_per_node)
    if job.nodes > LOCAL_NODES:
        raise RefusedError(f"nodes: must be at most {LOCAL_NODES} on one machine, got {job.nodes}; lower nodes")
    if ranks > LOCAL_RANKS:
        raise RefusedError(
            f"ranks_per_node: must be such that one machine has at most {LOCAL_RANKS} ranks, got {job.nodes} nodes x "
            f"{job.ranks_per_node}; lower nodes or ranks_per_node"
        )


def check_files(job: Job, environ: Mapping[str, str]) -> None:
    """Check that what the ranks will read is on this machine, before any of them is started.

    Raises:
        RefusedError: the working folder, the text or the prepared data set is not there.
    """
    if job.workdir is not None and not Path(job.workdir).is_dir():
        found = "is not a folder" if Path(job.workdir).exists() else "no such folder"
        raise RefusedError(f"workdir: {job.workdir}: {found}; make it, or correct workdir")
    if not isinstance(job.settings, TrainSettings):
        return
    if job.settings.data.text is not None:
        text_file(job.settings.data.text)
    elif job.settings.data.name == "cifar10":
        try:
            cifar10_files(data_root(environ))
        except RefusedError as error:
            raise RefusedError(f"train.data: {error}") from error


def this_machine() -> Machine:
    """Describe this machine as its agent would."""
    from launch.agent import visible_gpus

    return Machine(socket.gethostname(), tuple(sorted(os.sched_getaffinity(0))), tuple(visible_gpus()))
