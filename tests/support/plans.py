"""Contexts, machines and plans of an attempt, small enough to say what should come of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from muster.jobs.hosts.placement import Host, place
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.job import CommandSettings, Job
from muster.jobs.spec.site import Site
from muster.launch.plan.plan import (
    Context,
    NodeMachine,
    NodePlan,
    RankPlan,
    plan_nodes,
    shared_environment,
)


def make_context(
    *, site: Site | None = None, entry: str | None = None, address: str = "127.0.0.1", **keys: Any
) -> Context:
    settings = CommandSettings(argv=["program", "--flag", "a b"])
    job = Job(**{"name": "demo", "kind": "command", "settings": settings, **keys})
    placement = place(job, [Host("box", address)] * job.nodes)
    run = RunDir(Path("/runs/demo-20250101T000000Z-abc123"))
    return Context(job, site or Site(), placement, run, "/srv/job", "/opt/muster/bin/python", entry)


def box(cores: int, *gpus: str, host: str = "box") -> NodeMachine:
    return NodeMachine(host, tuple(range(cores)), gpus)


def plan(context: Context, machine: NodeMachine, port: int | None = 4242) -> list[NodePlan]:
    return plan_nodes(context, [machine] * len(context.placement.nodes), port)


def values(rank: RankPlan) -> dict[str, str]:
    return {each.name: each.value for each in rank.environment}


def shared(
    context: Context, environ: dict[str, str] | None = None, threads: int = 1, interface: str = ""
) -> dict[str, tuple[str, str]]:
    machine = replace(box(1), environ=environ or {}, interface=interface)
    return {each.name: (each.value, each.origin) for each in shared_environment(context, machine, threads)}
