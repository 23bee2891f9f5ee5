"""Make nodes fail in the ways that machines do, and heal them.

power    the link is cut first, then everything is killed: peers see silence
kill     everything is killed: peers see their connections end
unplug   the link is cut, the node continues: silence in both directions
freeze   all its processes are stopped; its kernel still answers
"""

import os
import signal
from collections.abc import Callable
from typing import Final

from muster.cloudlab.box import machine, network, nodes, slurm
from muster.cloudlab.box.paths import NETNS
from muster.cloudlab.box.processes import Identity, beside, in_network, is_listening, kill, wait_until
from muster.cloudlab.box.remove import remove_links
from muster.cloudlab.box.spec import HEAD
from muster.cloudlab.box.state import BoxState
from muster.cloudlab.box.tools import Tools
from muster.jobs.basics.errors import RefusedError

FREEZE_S: Final = 10.0


def fail(state: BoxState, node: str, how: str, tools: Tools) -> None:
    """Make a node fail in one of the `WAYS`; do nothing if it has already failed in that way.

    Raises:
        RefusedError: if the node cannot fail in that way now.
    """
    WAYS[how](state, state.spec.check_node(node), tools)


def heal(state: BoxState, node: str, tools: Tools) -> None:
    """Bring a node back: continue its processes, or start it again; then plug its link in.

    Raises:
        RefusedError: if the node does not come back in time.
    """
    spec = state.spec
    init = nodes.identity_of(state, spec.check_node(node))
    if init is None:
        _start_again(state, node, tools)
    else:
        _signal_all(beside(init), signal.SIGCONT)
        plug(state, node, tools, plugged=True)
    if spec.slurm and is_controlled(state):
        watched = spec.compute if node == HEAD else [node]
        watched = [each for each in watched if node == each or is_well(state, each)]
        nodes.await_idle(state, watched, nodes.slurm_tools(state, tools.lock), state_is=is_in_service)


def is_controlled(state: BoxState) -> bool:
    """Return True if Slurm's controller can be queried."""
    head = nodes.identity_of(state, HEAD)
    return head is not None and is_well(state, HEAD) and is_listening(head.pid, slurm.CTLD_PORT)


def is_well(state: BoxState, node: str) -> bool:
    """Return True if a node runs, is not frozen, and is plugged in."""
    init = nodes.identity_of(state, node)
    return init is not None and not init.is_stopped and is_plugged(state, node)


def is_plugged(state: BoxState, node: str) -> bool:
    """Return True if a node's link is plugged in."""
    try:
        text = (machine.LINKS / state.spec.veth(node) / "brport" / "state").read_text(encoding="ascii")
    except FileNotFoundError:
        return False
    return int(text) == network.PORT_FORWARDING


def is_in_service(slurm_state: str) -> bool:
    """Return True if Slurm considers a node usable: not down, and not silent (`*`)."""
    return bool(slurm_state) and not slurm_state.startswith(("down", "unk")) and not slurm_state.endswith("*")


def plug(state: BoxState, node: str, tools: Tools, *, plugged: bool) -> None:
    """Plug a node's link in, or unplug it.

    Raises:
        RefusedError: if the program `bridge` failed.
    """
    tools.batches([(["bridge"], [network.port_line(state.spec, node, plugged=plugged)])])


def _power(state: BoxState, node: str, tools: Tools) -> None:
    _unplug(state, node, tools)
    _kill(state, node, tools)


def _kill(state: BoxState, node: str, tools: Tools) -> None:
    del tools
    init = nodes.identity_of(state, node)
    kill([init] if init is not None else [])


def _unplug(state: BoxState, node: str, tools: Tools) -> None:
    plug(state, node, tools, plugged=False)


def _freeze(state: BoxState, node: str, tools: Tools) -> None:
    del tools
    init = nodes.living(state, node)

    def all_stopped() -> bool:  # processes may be forking, so this repeats until no process is left to stop
        running = [each for each in beside(init) if each.is_alive and not each.is_stopped]
        _signal_all(running, signal.SIGSTOP)
        return not running

    if not wait_until(all_stopped, FREEZE_S):
        raise RefusedError(
            f"{node}: not all its processes could be stopped within {FREEZE_S:.0f} s; look for state D in ps"
        )


# The ways in which a node can fail, by the value of --how.
WAYS: Final[dict[str, Callable[[BoxState, str, Tools], None]]] = {
    "power": _power,
    "kill": _kill,
    "unplug": _unplug,
    "freeze": _freeze,
}


def _start_again(state: BoxState, node: str, tools: Tools) -> None:
    """Start a dead node again, like a machine after a reboot: its network is new, its disk unchanged."""
    spec = state.spec
    netns = NETNS / spec.netns(node)
    kill(in_network(netns))
    link = [spec.veth(node)] if (machine.LINKS / spec.veth(node)).exists() else []
    remove_links(link, [netns.name] if netns.exists() else [], tools)
    nodes.make_folders(state, [node], tools)
    nodes.make_links(state, [node], tools, bridge=False)
    nodes.start_nodes(state, [node], tools, anew=False)


def _signal_all(processes: list[Identity], number: signal.Signals) -> None:
    for each in processes:
        try:
            descriptor = os.pidfd_open(each.pid)
        except ProcessLookupError:
            continue
        try:
            if each.is_alive:
                signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            pass  # the process has just ended
        finally:
            os.close(descriptor)
