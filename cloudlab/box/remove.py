"""Remove a box, complete or half made: processes first, then links and namespaces, then files."""

import re
import shutil
from pathlib import Path
from typing import Final

from muster.cloudlab.box import machine
from muster.cloudlab.box.paths import NETNS, BoxPaths
from muster.cloudlab.box.processes import in_network, kill, read_identity
from muster.cloudlab.box.spec import bridge_alias, netns_pattern
from muster.cloudlab.box.state import BoxState, locked_folder, read_state, root_lock
from muster.cloudlab.box.tools import Tools

ROUNDS: Final = 50


def take_down(name: str) -> bool:
    """Remove every part of a box; return whether any part existed.

    Raises:
        RefusedError: if the caller is not root, or a part cannot be removed.
    """
    machine.need_root("muster box down")
    paths = BoxPaths.of(name)
    found = paths.path.exists() or bool(namespaces(name)) or bool(_links(name, None))
    if found:
        programs = machine.find_programs(with_slurm=False)
        with locked_folder(paths.path):  # the lock yields None if only namespaces are left
            remove(name, read_state(name), Tools(programs))
    with root_lock():
        return found


def remove(name: str, state: BoxState | None, tools: Tools) -> None:
    """Remove a box; the caller holds its lock.

    Raises:
        RefusedError: if a part cannot be removed.
    """
    paths = BoxPaths.of(name)
    nodes = list(paths.nodes.iterdir()) if paths.nodes.is_dir() else []
    if state is not None and not state.is_stale:
        inits = (read_identity(paths.node(node.name).init) for node in nodes)
        kill(each for each in inits if each is not None)
    found = namespaces(name)
    _empty(found)
    remove_links(_links(name, state), [path.name for path in found], tools)
    shutil.rmtree(paths.path, ignore_errors=False) if paths.path.exists() else None
    for folder in reversed(state.made_folders if state is not None else ()):
        if Path(folder).is_dir() and not any(Path(folder).iterdir()):
            Path(folder).rmdir()


def remove_links(links: list[str], namespaces: list[str], tools: Tools) -> None:
    """Remove links of the host, and network namespaces.

    Raises:
        RefusedError: if a link or namespace cannot be removed.
    """
    lines = [f"link del {link}" for link in links] + [f"netns del {name}" for name in namespaces]
    tools.batches([(["ip"], lines)])


def _empty(namespaces: list[Path]) -> None:
    """Kill processes in the nodes' namespaces that the nodes' first processes did not start."""
    for _ in range(ROUNDS):
        left = [process for path in namespaces for process in in_network(path)]
        if not left:
            return
        kill(left)


def namespaces(name: str) -> list[Path]:
    """List the network namespaces of a box, found by name because the box's size may be unknown."""
    if not NETNS.is_dir():
        return []
    return [path for path in sorted(NETNS.iterdir()) if netns_pattern(name).fullmatch(path.name)]


def _links(name: str, state: BoxState | None) -> list[str]:
    """List the existing links of a box, the bridge last."""
    there = sorted(path.name for path in machine.LINKS.iterdir())
    bridges = {link for link in there if _alias(link) == bridge_alias(name)}
    bridges |= {state.spec.bridge} if state is not None else set()
    return [link for link in reversed(there) for bridge in bridges if re.fullmatch(rf"{bridge}(n\d+|h)?", link)]


def _alias(link: str) -> str:
    try:
        return (machine.LINKS / link / "ifalias").read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):  # the link is gone, or this is a file, not a link
        return ""
