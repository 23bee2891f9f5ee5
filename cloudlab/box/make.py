"""Create a box. Its state is written first, so that `muster box down` can always remove it."""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from muster.cloudlab.box import machine, nodes, slurm, texts
from muster.cloudlab.box.hosts import name_flag
from muster.cloudlab.box.paths import BoxPaths
from muster.cloudlab.box.remove import namespaces, remove
from muster.cloudlab.box.spec import BoxSpec, Rates
from muster.cloudlab.box.state import (
    PRIVATE,
    BoxState,
    boot_id,
    box_names,
    locked_folder,
    read_state,
    root_lock,
    write_state,
)
from muster.cloudlab.box.tools import Tools
from muster.jobs.basics.errors import RefusedError

MUNGE_KEY_BYTES = 1024


def make(spec: BoxSpec) -> BoxState:
    """Create a box and wait until it can be used. On failure, remove all its parts.

    Raises:
        RefusedError: if the box exists already, or this machine cannot create it.
    """
    machine.need_root("muster box up")
    programs = machine.find_programs(with_slurm=spec.slurm)
    faketime = machine.find_faketime() if spec.clocks else ""
    state = _register(spec, programs, faketime)
    with locked_folder(BoxPaths.of(spec.name).path) as lock:
        if lock is None:
            raise RefusedError(f"box {spec.name} was taken down while it was being made")
        with _nothing_left_behind(state, Tools(programs, lock)):
            _build(state, Tools(programs, lock))
            done = replace(state, complete=True)
            write_state(done)
    return done


def _register(spec: BoxSpec, programs: dict[str, str], faketime: str) -> BoxState:
    """Choose the box's number and write its state."""
    folder = BoxPaths.of(spec.name).path
    with root_lock():
        if folder.exists() or namespaces(spec.name):
            raise _there_already(spec.name)
        others = [read_state(name) for name in box_names()]
        taken = [other.spec.number for other in others if other is not None]
        number = machine.choose_number(spec.name, taken, Tools(programs))
        made = _missing_folders(spec.private_runs)
        state = BoxState(
            spec=replace(spec, number=number),
            rates=Rates(spec.rate),
            boot=boot_id(),
            made_folders=made,
            faketime=faketime,
            programs=programs,
        )
        folder.mkdir(mode=PRIVATE)
        write_state(state)
    return state


def _there_already(name: str) -> RefusedError:
    state = read_state(name)
    what = "exists already" if state is not None and state.complete else "is incomplete, or is still being made"
    return RefusedError(f"box {name} {what}; take it down first: sudo muster box down{name_flag(name)}")


@contextmanager
def _nothing_left_behind(state: BoxState, tools: Tools) -> Iterator[None]:
    try:
        yield
    except BaseException:
        remove(state.spec.name, state, tools)
        raise


def _build(state: BoxState, tools: Tools) -> None:
    spec = state.spec
    _write_files(state, tools)
    nodes.make_folders(state, spec.members, tools)
    _write_keys(state)
    nodes.make_links(state, spec.members, tools, bridge=True)
    nodes.start_nodes(state, spec.members, tools, anew=True)
    nodes.check_reach(state)
    if spec.slurm:
        controller = nodes.slurm_tools(state, tools.lock)
        nodes.await_idle(state, spec.compute, controller, state_is=lambda text: text == slurm.IDLE)


def _write_files(state: BoxState, tools: Tools) -> None:
    """Write the files shared by all nodes."""
    spec, paths = state.spec, BoxPaths.of(state.spec.name)
    for path in state.made_folders:
        Path(path).mkdir(exist_ok=True)
    tools.run(texts.keygen_argv(str(paths.client_key), f"muster box {spec.name}"))
    shutil.copyfile(f"{paths.client_key}.pub", paths.authorized_keys)
    if "SUDO_UID" in os.environ:  # the user who called sudo can then run ssh without sudo
        os.chown(paths.client_key, int(os.environ["SUDO_UID"]), int(os.environ.get("SUDO_GID", "-1")))
    paths.hosts.write_text(texts.hosts_file(spec, socket.gethostname()), encoding="utf-8")
    paths.ssh_config.write_text(texts.ssh_config(spec, paths), encoding="utf-8")
    paths.sshd_config.write_text(texts.sshd_config(paths), encoding="utf-8")
    if spec.slurm:
        paths.slurm_conf.write_text(slurm.slurm_conf(spec, paths, machine.memory_mb()), encoding="utf-8")
        paths.cgroup_conf.write_text(slurm.cgroup_conf(), encoding="utf-8")
        paths.munge.mkdir(mode=0o755)
        paths.slurm.mkdir(mode=0o700)
        key = paths.munge / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(MUNGE_KEY_BYTES))


def _write_keys(state: BoxState) -> None:
    """Write the host keys of all nodes to known_hosts."""
    spec, paths = state.spec, BoxPaths.of(state.spec.name)
    public = {node: Path(f"{paths.node(node).host_key}.pub").read_text(encoding="utf-8") for node in spec.members}
    paths.known_hosts.write_text(texts.known_hosts(spec, public), encoding="utf-8")


def _missing_folders(path: str | None) -> tuple[str, ...]:
    """List the missing folders of a path, outermost first."""
    if path is None:
        return ()
    missing = [folder for folder in (Path(path), *Path(path).parents) if not folder.exists()]
    return tuple(str(folder) for folder in reversed(missing))
