"""From the command line to a context: load the job and the site, place the ranks, check what can be checked here.

Nothing is started and nothing is written, so that `muster plan` and `muster run` share it to the end.
"""

import argparse
import json
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from jobs.load import load_job
from jobs.placement import Host, place
from jobs.rundir import RunDir, run_path, runs_root
from jobs.site import load_site
from launch.kinds import BY_KEY, KINDS
from launch.plan import Context, Machine

LOCAL_ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class Prepared:
    """A context, and the texts that the run folder keeps."""

    context: Context
    job_text: str
    site_text: str


def prepare(args: argparse.Namespace) -> Prepared:
    """Load, place and check a job for this machine.

    Raises:
        JobFileError: the job or site file is wrong.
        RefusedError: job and machine do not fit together.
    """
    name = [] if args.name is None else [f"name={json.dumps(args.name)}"]
    loaded = load_job(Path(args.job), KINDS, [*args.overrides, *name])
    job = loaded.job
    site = load_site(args.site)
    machine = this_machine()
    # On one's own machine more ranks than cores are welcome: slots count only for a job that asks for them.
    slots = len(machine.gpus) or len(machine.cores)
    host = Host(machine.host, LOCAL_ADDRESS, slots=slots if job.ranks_per_node == "slots" else None)
    placement = place(job, [host] * job.nodes)
    BY_KEY[job.kind].check(job.settings, placement.world_size)
    run = RunDir(run_path(runs_root(args.runs or site.runs), job.name))
    context = Context(
        job=job,
        site=site,
        placement=placement,
        run=run,
        workdir=job.workdir or str(Path.cwd()),
        python=sys.executable,
        entry=BY_KEY[job.kind].entry,
    )
    site_text = yaml.safe_dump(site.model_dump(mode="json"), sort_keys=False)
    return Prepared(context, loaded.text, site_text)


def this_machine() -> Machine:
    """Describe this machine as its agent would."""
    from launch.agent import visible_gpus

    return Machine(socket.gethostname(), tuple(sorted(os.sched_getaffinity(0))), tuple(visible_gpus()))
