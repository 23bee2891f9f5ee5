"""The plan of an attempt, from a placement to the start message of each node. Pure: `muster plan` uses the same code.

A node's start message holds one RankStart (`jobs/node/rank_start.py`) per rank. Facts that only the machine knows
(cores, GPUs, whether torch is installed) are in `NodeMachine`. The master port is None until it is bound.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from muster.jobs.basics.boot import importable
from muster.jobs.basics.errors import RefusedError
from muster.jobs.hosts.placement import NodePlacement, Placement, divide, pin
from muster.jobs.hosts.ranks import FILES, OF_A_RANK, SESSION, STOP_FILE, variables_of_one
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.failover import CheckpointSettings
from muster.jobs.spec.job import Job
from muster.jobs.spec.plain import spelled
from muster.jobs.spec.site import Site
from muster.launch.plan.interpreter import Interpreter
from muster.launch.wire.messages import Start

GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE: Final = "NCCL_SOCKET_IFNAME"
PORT_ORIGIN: Final = "bound by node 0's agent when it starts"
SESSION_VERSION: Final = 1


@dataclass(frozen=True)
class NodeMachine:
    """The facts about a node that its agent reports."""

    host: str
    cores: tuple[int, ...]
    gpus: tuple[str, ...] = ()
    torch: bool = True
    # the variables on which plans depend: PATH and those of the network
    environ: Mapping[str, str] = field(default_factory=dict)
    interface: str = ""  # the interface that routes to the master; "": all ranks are on this machine
    run: RunDir | None = None  # this node's own run folder, if it does not share the supervisor's


class EnvValue(NamedTuple):
    """One environment variable of a rank, and the reason for its value."""

    name: str
    value: str
    origin: str


@dataclass(frozen=True)
class RankPlan:
    """The plan of one rank: its cores and GPUs, and every variable that Muster sets for it."""

    rank: int
    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    threads: int
    draw_up: Callable[[], tuple[EnvValue, ...]]  # 100,000 ranks have 2 million variables, so no plan holds them

    @property
    def environment(self) -> tuple[EnvValue, ...]:
        """The rank's variables."""
        return self.draw_up()


@dataclass(frozen=True)
class NodePlan:
    """The plan of one node: its ranks, and the environment of its warm process."""

    placement: NodePlacement
    run: RunDir
    apart: bool  # the supervisor cannot see `run`, so its files have to be sent
    warm_environment: tuple[EnvValue, ...]
    ranks: tuple[RankPlan, ...]


@dataclass(frozen=True)
class Context:
    """The values that all nodes of an attempt share."""

    job: Job
    site: Site
    placement: Placement
    run: RunDir
    workdir: str
    python: str  # absolute path of Muster's own interpreter
    entry: str | None  # the "module:function" that a forked rank calls; None: ranks execute a program
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments for that function, besides the job
    attempt: int = 0
    adopted: Mapping[int, int] = field(default_factory=dict)  # {rank: rank of the last attempt} that continues in place
    rejoin_s: float = 6.0  # ranks must have continued in place by then; else all ranks restart
    code: str | None = None  # the root of the code that agents run, if it is a snapshot
    remote: bool = False  # true if agents run on other machines
    iface: str | None = None  # the user's choice of network: an interface, or a CIDR
    tee: bool = False  # the supervisor shows the output of every rank, not only of rank 0
    spares: tuple[NodePlacement, ...] = ()  # nodes with an agent but without ranks, until another node is lost
    interpreter: Interpreter | None = None  # runs the ranks; None: Muster's own, and commands stay unchanged

    @property
    def run_nodes(self) -> tuple[NodePlacement, ...]:
        """Every node that gets an agent. A node's index in this tuple, its slot, is fixed for the whole run."""
        return (*self.placement.nodes, *self.spares)

    @property
    def command(self) -> list[str]:
        """The words of a `command:` job, as written in its file."""
        words: list[str] = self.job.settings.model_dump()["argv"]
        return words

    @property
    def warm_python(self) -> tuple[str, ...]:
        """The words that start the warm process in the job's own Python; empty if it runs in Muster's."""
        return self.interpreter.words if self.entry is not None and self.interpreter else ()

    @property
    def has_setup(self) -> bool:
        """True if setup lines are run on every node before its ranks."""
        return bool(self.site.setup or self.job.setup)

    @property
    def argv(self) -> list[str]:
        """The command that every rank of a `command:` job executes."""
        return self.interpreter.argv(self.command) if self.interpreter else self.command


def preload(context: Context) -> str:
    """Return the modules that the warm process imports, separated by commas; "" if ranks execute a program."""
    if context.entry is None:
        return ""
    compiler = ["torch._dynamo"] if getattr(context.job.settings, "uses_compiler", False) else []
    return ",".join(["torch", "torch.distributed", *compiler, context.entry.partition(":")[0]])


def shared_environment(context: Context, machine: NodeMachine, threads: int) -> tuple[EnvValue, ...]:
    """Return the variables of a node's warm process. The job's variables override the site's, which override Muster's.

    Raises:
        RefusedError: if a file sets a rank variable.
    """
    values = {"MUSTER_RUN_ID": EnvValue("MUSTER_RUN_ID", context.run.run_id, "the run")}

    def add(name: str, value: str, origin: str) -> None:
        values[name] = EnvValue(name, value, origin)

    add("OMP_NUM_THREADS", str(threads), f"threads_per_rank: {context.job.threads_per_rank}")
    add("PYTHONUNBUFFERED", "1", "so that a killed rank's last lines are not lost")
    folder, origin = str(Path(context.python).parent), "the interpreter's folder first, so that python is Muster's own"
    if context.interpreter is not None:
        folder, origin = context.interpreter.folder, "the interpreter's folder first, so that its programs are found"
    if folder:
        add("PATH", _joined(folder, machine.environ.get("PATH")), origin)
    interface, origin = machine.interface, f"the route to the master {context.placement.master_addr}"
    if context.placement.one_host:
        interface, origin = "lo", "all ranks are on this machine"
    if interface and GLOO_INTERFACE not in machine.environ:
        add(GLOO_INTERFACE, interface, origin)
    if interface not in ("", "lo") and NCCL_INTERFACE not in machine.environ:
        add(NCCL_INTERFACE, f"={interface}", origin)
    if context.site.data is not None:
        add("MUSTER_DATA", context.site.data, "site file: data")
    for file, env in (("site file", context.site.env), ("job file", context.job.env)):
        for name, value in env.items():
            if name in OF_A_RANK:
                raise RefusedError(f"{file}: env.{name}: Muster sets this for each rank; remove it")
            add(name, value, f"{file}: env")
    if context.entry is None:
        given = values.get("PYTHONPATH")
        behind = given.value if given else machine.environ.get("PYTHONPATH")
        root = context.code if context.remote else None
        add("PYTHONPATH", _joined(importable(root), behind), "the folder of `import muster` first")
    return tuple(values.values())


def _joined(first: str, rest: str | None) -> str:
    return f"{first}{os.pathsep}{rest}" if rest else first


def plan_nodes(context: Context, machines: Sequence[NodeMachine], master_port: int | None) -> list[NodePlan]:
    """Plan every node of an attempt. Pretend nodes on one host divide its cores and GPUs."""
    nodes = context.placement.nodes
    shares = _shares(machines)
    session = session_text(context) if context.entry is None else ""
    plans = []
    for node, machine in zip(nodes, shares, strict=True):
        pinned = pin(machine.cores, node.ranks)
        divided = len(machines) > 1 and machine.gpus != machines[node.node_rank].gpus
        threads = _threads(context.job, machine, node)
        ranks = tuple(
            RankPlan(
                rank=node.first_rank + local_rank,
                cores=pinned[local_rank],
                gpus=machine.gpus,
                threads=threads,
                draw_up=partial(
                    _rank_environment, context, machine, node.first_rank + local_rank, master_port, divided, session
                ),
            )
            for local_rank in range(node.ranks)
        )
        environment = shared_environment(context, machine, threads)
        plans.append(NodePlan(node, machine.run or context.run, machine.run is not None, environment, ranks))
    return plans


def start_messages(context: Context, plans: Iterable[NodePlan], *, store: bool, master_port: int) -> Iterator[Start]:
    """Convert the plan of each node to the agent's start message: data, never shell text."""
    what: dict[str, Any] = (
        {"argv": context.argv}
        if context.entry is None
        else {
            "call": context.entry,
            "payload": {"job": job_for_ranks(context.job), "stays": stays(context.job), **context.options},
        }
    )
    loaded = (context.options.get("resume") or {}).get("step")
    for plan in plans:
        attempt = plan.run.attempt(context.attempt)
        outputs = [attempt.outputs(rank.rank) for rank in plan.ranks]
        yield Start(
            attempt=context.attempt,
            node=plan.placement.node_rank,  # an agent keeps its slot, but its node rank may change in the next attempt
            attempt_dir=str(attempt.path),
            apart=plan.apart,
            workdir=context.workdir,
            setup=(*context.site.setup, *context.job.setup),
            store=store,
            master_port=master_port,
            warm={
                "preload": preload(context),
                "env": {each.name: each.value for each in plan.warm_environment},
                "python": context.warm_python,
            },
            console=tuple(rank.rank for rank in plan.ranks if context.tee or rank.rank == 0),
            ranks=tuple(
                {
                    "rank": rank.rank,
                    "env": env,
                    "workdir": context.workdir,
                    "out": out,
                    "err": err,
                    "cores": list(rank.cores),
                    "gpus": list(rank.gpus),
                    "threads": rank.threads,
                    **({"adopt": old, "steps": loaded} if (old := context.adopted.get(rank.rank)) is not None else {}),
                    **what,
                }
                for rank, env, (out, err) in zip(plan.ranks, _variables(plan), outputs, strict=True)
            ),
        )


def _variables(plan: NodePlan) -> Iterator[dict[str, str]]:
    """Yield the variables of each rank of a node: those of its first rank, with the few that differ."""
    first = {each.name: each.value for rank in plan.ranks[:1] for each in rank.environment}
    for local_rank, rank in enumerate(plan.ranks):
        yield {**first, **variables_of_one(rank.rank, local_rank)}


def stays(job: Job) -> bool:
    """Return whether ranks wait for the next attempt when they have lost others, and continue in it."""
    return job.kind == "train" and job.restart is not None and job.restart.in_place == "auto"


def job_for_ranks(job: Job) -> dict[str, Any]:
    """Return the job as its ranks read it. Ranks validate it again, unless they run in the job's own Python."""
    return spelled(job) if job.kind == "train" else job.model_dump(mode="json", exclude_unset=True)


def session_text(context: Context) -> str:
    """Return the JSON that describes the job to a program's `muster.session()`.

    `saving` is false if the nodes share no run folder, because no checkpoint could be complete.
    """
    settings = context.job.checkpoint or CheckpointSettings()
    return json.dumps(
        {
            "version": SESSION_VERSION,
            "job": context.job.name,
            "checkpoint": settings.model_dump(mode="json"),
            "attempt": context.attempt,
            "hang_s": context.job.hang_s,
            "saving": bool(context.options.get("saving", True)),
            "resume": context.options.get("resume"),
        }
    )


def _shares(machines: Sequence[NodeMachine]) -> list[NodeMachine]:
    """Divide a host's cores and GPUs among its pretend nodes."""
    shares = list(machines)
    groups: dict[str, list[int]] = {}
    for index, machine in enumerate(machines):
        groups.setdefault(machine.host, []).append(index)
    for here in groups.values():
        cores = divide(machines[here[0]].cores, len(here))
        gpus = divide(machines[here[0]].gpus, len(here))
        for index, its_cores, its_gpus in zip(here, cores, gpus, strict=True):
            shares[index] = replace(machines[index], cores=its_cores, gpus=its_gpus)
    return shares


def _threads(job: Job, machine: NodeMachine, node: NodePlacement) -> int:
    if job.threads_per_rank == "auto":
        return max(1, len(machine.cores) // node.ranks)
    return job.threads_per_rank


def _rank_environment(
    context: Context, machine: NodeMachine, rank: int, master_port: int | None, divided: bool, session: str
) -> tuple[EnvValue, ...]:
    run = machine.run or context.run
    env = context.placement.rank_env(
        rank,
        master_port=master_port or 0,
        attempt=context.attempt,
        run_id=context.run.run_id,
        run_dir=str(run.path),
        agent_store=machine.torch,
    )
    values = []
    for name, value in env.variables().items():
        if name == "MASTER_PORT":
            values.append(EnvValue(name, str(master_port) if master_port else "", PORT_ORIGIN))
        elif name == "MASTER_ADDR":
            values.append(EnvValue(name, value, "address of node 0"))
        elif name == "TORCHELASTIC_USE_AGENT_STORE":
            values.append(EnvValue(name, value, "node 0's agent hosts the store" if env.agent_store else "no torch"))
        else:
            values.append(EnvValue(name, value, "placement"))
    if context.entry is None:
        file = run.attempt(context.attempt).stop(env.node_rank)
        values.append(EnvValue(STOP_FILE, str(file), "written before SIGTERM: the reason, and the deadline"))
        values.append(EnvValue(FILES, str(run.files), "for the program's own files, the same in all attempts"))
        values.append(EnvValue(SESSION, session, "read by muster.session()"))
    if divided and machine.gpus:
        values.append(EnvValue("CUDA_VISIBLE_DEVICES", ",".join(machine.gpus), "pretend nodes divide the GPUs"))
    return tuple(values)
