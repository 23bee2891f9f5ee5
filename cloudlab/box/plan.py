"""The plan of a node's first process: mounts, then services.

This module computes the plan, and `cloudlab.box.init` executes it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from muster.cloudlab.box import slurm, texts
from muster.cloudlab.box.paths import NETNS, BoxPaths
from muster.cloudlab.box.spec import HEAD, BoxSpec
from muster.jobs.basics.reading import parse_json

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Service:
    """A daemon of a node."""

    name: str
    argv: tuple[str, ...]
    log: str
    environment: Mapping[str, str] = field(default_factory=dict)
    detaches: bool = False  # True: the started process ends once the daemon is ready


@dataclass(frozen=True)
class BoxNodePlan:
    """Everything that the first process of a node needs to know."""

    node: str
    netns: str
    identity: str  # the file for the pid and start time of the node's first process
    binds: tuple[tuple[str, str], ...]  # source, target
    services: tuple[Service, ...]

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: bytes) -> "BoxNodePlan":
        """Parse the output of `to_json`."""
        raw: dict[str, Any] = parse_json(text)
        services = tuple(Service(**{**each, "argv": tuple(each["argv"])}) for each in raw.pop("services"))
        binds = tuple((source, target) for source, target in raw.pop("binds"))
        return BoxNodePlan(**raw, binds=binds, services=services)


def node_plan(
    spec: BoxSpec, paths: BoxPaths, node: str, programs: Mapping[str, str], *, anew: bool, faketime: str = ""
) -> BoxNodePlan:
    """Return the plan of one node; `programs` maps names to paths. `anew` is True if the box is being created."""
    own = paths.node(node)
    binds = [(str(paths.hosts), "/etc/hosts"), (str(own.passwd), "/etc/passwd")]
    if spec.private_runs is not None and node != HEAD:
        binds.append((str(own.runs), spec.private_runs))
    return BoxNodePlan(
        node=node,
        netns=str(NETNS / spec.netns(node)),
        identity=str(own.init),
        binds=tuple(binds),
        services=tuple(_services(spec, paths, node, programs, anew=anew, faketime=faketime)),
    )


def session_environment(spec: BoxSpec, paths: BoxPaths, node: str, faketime: str = "") -> dict[str, str]:
    """Return the variables that are added to the environment of logins and commands in a node."""
    found = {"SLURM_CONF": str(paths.slurm_conf)} if spec.slurm else {}
    if node in spec.clocks:
        found |= texts.faketime(faketime, spec.clocks[node])
    return found


def _services(
    spec: BoxSpec, paths: BoxPaths, node: str, programs: Mapping[str, str], *, anew: bool, faketime: str
) -> list[Service]:
    own = paths.node(node)
    plain = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": str(own.home)}
    session = session_environment(spec, paths, node, faketime)
    argv = texts.sshd_argv(programs["sshd"], paths, own, session)
    services = [Service("sshd", tuple(argv), str(own.log("sshd")), plain)]
    if not spec.slurm:
        return services
    plain = plain | {"SLURM_CONF": str(paths.slurm_conf)}
    if node == HEAD:
        munged = slurm.munged_argv(programs["munged"], paths)
        services.append(Service("munged", tuple(munged), str(own.log("munged")), plain, detaches=True))
        name, argv = "slurmctld", slurm.slurmctld_argv(programs["slurmctld"], anew=anew)
    else:
        name, argv = "slurmd", slurm.slurmd_argv(programs["slurmd"], node)
    # The daemon writes its own log. Until the daemon has read the path of its log, its output goes to this file.
    services.append(Service(name, tuple(argv), str(own.log(f"{name}-start")), plain))
    return services
