"""The nodes of a box as hosts for a job."""

from muster.cloudlab.box.paths import BoxPaths
from muster.cloudlab.box.spec import DEFAULT_NAME
from muster.cloudlab.box.state import BoxState, box_names, read_state
from muster.jobs.basics.errors import RefusedError, UsageError
from muster.jobs.hosts.hosts import HostSet
from muster.jobs.hosts.placement import Host, Login


def box_hosts(name: str | None) -> HostSet:
    """Return the nodes of a box and their ssh options. Without a name, use the only box, or the one named `box`.

    Raises:
        UsageError: if there is no such box, or the choice is ambiguous.
        RefusedError: if the box is incomplete, or older than the machine's last reboot.
    """
    state = find_box(name)
    spec, paths = state.spec, BoxPaths.of(state.spec.name)
    if not state.complete or state.is_stale:
        raise RefusedError(
            f"box {spec.name} {'was made before this machine rebooted' if state.is_stale else 'is incomplete'}; "
            f"run sudo muster box down{name_flag(spec.name)}, then create it again"
        )
    return HostSet(
        hosts=tuple(Host(node, spec.address(node), login=Login(node)) for node in spec.compute),
        origin=f"box {spec.name}",
        ssh_options=("-F", str(paths.ssh_config)),
        environment={"SLURM_CONF": str(paths.slurm_conf)} if spec.slurm else {},
    )


def find_box(name: str | None) -> BoxState:
    """Return the state of a box. Without a name, use the only box, or the one named `box`.

    Raises:
        UsageError: if there is no such box, or the choice is ambiguous.
    """
    names = box_names()
    if name is None:
        if len(names) > 1 and DEFAULT_NAME not in names:
            raise UsageError(f"there are {len(names)} boxes: {', '.join(names)}; name one of them")
        name = names[0] if len(names) == 1 else DEFAULT_NAME
    state = read_state(name)
    if state is None:
        there = f"existing boxes: {', '.join(names)}" if names else "no box exists"
        raise UsageError(f"there is no box {name} ({there}); make it: sudo muster box up{name_flag(name)}")
    return state


def name_flag(name: str) -> str:
    """Return the command line option that selects this box."""
    return "" if name == DEFAULT_NAME else f" --name {name}"
