"""The current state of a box, read from the kernel and Slurm, not from the box's files."""

import os
from dataclasses import asdict, dataclass
from typing import Any, Final

from muster.cloudlab.box import nodes
from muster.cloudlab.box.failures import is_controlled, is_plugged
from muster.cloudlab.box.paths import BoxPaths
from muster.cloudlab.box.processes import beside, is_listening
from muster.cloudlab.box.spec import HEAD, rate_text
from muster.cloudlab.box.state import BoxState
from muster.jobs.basics.errors import MusterError

UP: Final = "up"
DOWN: Final = "down"
UNPLUGGED: Final = "unplugged"
FROZEN: Final = "frozen"


@dataclass(frozen=True)
class NodeStatus:
    """The state of one node."""

    node: str
    address: str
    state: str  # up, down, unplugged or frozen; several words are joined by +
    sshd: bool
    slurm: str | None  # the text of sinfo; None without Slurm, or if the controller does not answer
    pid: int | None  # pid of the node's first process, on the host
    processes: int | None  # number of processes; None unless the caller is root, because only root can count them


@dataclass(frozen=True)
class BoxStatus:
    """The state of a whole box."""

    name: str
    state: str  # up, half-made or stale
    network: str
    rate: str
    slow_pairs: tuple[tuple[str, str, str], ...]
    slow_nodes: tuple[tuple[str, str], ...]
    slurm: bool
    private_runs: str | None
    folder: str
    ssh_config: str
    slurm_conf: str | None
    nodes: tuple[NodeStatus, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the status as plain values."""
        return asdict(self)


def look(state: BoxState) -> BoxStatus:
    """Return the current state of a box."""
    spec, paths = state.spec, BoxPaths.of(state.spec.name)
    told = _slurm_states(state)
    return BoxStatus(
        name=spec.name,
        state="stale" if state.is_stale else "up" if state.complete else "half-made",
        network=spec.network,
        rate=rate_text(state.rates.every),
        slow_pairs=tuple((one, other, rate_text(rate)) for (one, other), rate in state.rates.pairs.items()),
        slow_nodes=tuple((node, rate_text(rate)) for node, rate in state.rates.nodes.items()),
        slurm=spec.slurm,
        private_runs=spec.private_runs,
        folder=str(paths.path),
        ssh_config=str(paths.ssh_config),
        slurm_conf=str(paths.slurm_conf) if spec.slurm else None,
        nodes=tuple(_node(state, node, told.get(node)) for node in spec.members),
    )


def _node(state: BoxState, node: str, slurm_state: str | None) -> NodeStatus:
    init = nodes.identity_of(state, node)
    words = [] if init is not None else [DOWN]
    words += [FROZEN] if init is not None and init.is_stopped else []
    words += [] if is_plugged(state, node) else [UNPLUGGED]
    return NodeStatus(
        node=node,
        address=state.spec.address(node),
        state="+".join(words) or UP,
        sshd=init is not None and is_listening(init.pid, nodes.SSH_PORT),
        slurm=slurm_state,
        pid=init.pid if init is not None else None,
        processes=(len(beside(init)) if init is not None else 0) if os.geteuid() == 0 else None,
    )


def _slurm_states(state: BoxState) -> dict[str, str]:
    if not state.spec.slurm or not is_controlled(state):
        return {}
    try:
        return {**nodes.slurm_states(nodes.slurm_tools(state)), HEAD: "controller"}
    except MusterError:
        return {HEAD: "does not answer"}
