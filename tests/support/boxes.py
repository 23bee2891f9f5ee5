"""Real boxes for tests, what must not be left of one, and ssh into it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from muster.cloudlab.box.control import Box
from muster.cloudlab.box.paths import NETNS, BoxPaths
from muster.cloudlab.box.spec import netns_pattern
from muster.cloudlab.box.state import read_state
from muster.jobs.basics.boot import CODE_ROOT


def muster(*words: str) -> list[str]:
    """Return the argv of a muster command."""
    return [sys.executable, "-I", f"{CODE_ROOT}/muster/launch/boot.py", "muster", *words]


def number_of(name: str) -> int | None:
    """Return the number of a box that is there, half made ones included."""
    state = read_state(name)
    return None if state is None else state.spec.number


def leftovers(name: str, number: int | None) -> list[str]:
    """List everything that is still there of a box, whatever its files say; its number where one was ever chosen."""
    found = [str(BoxPaths.of(name).path)] if BoxPaths.of(name).path.exists() else []
    if NETNS.is_dir():
        found += [f"namespace {path.name}" for path in NETNS.iterdir() if netns_pattern(name).fullmatch(path.name)]
    if number:
        ours = (f"mb{number}n", f"mb{number}h")
        links = [path.name for path in Path("/sys/class/net").iterdir()]
        found += [f"link {link}" for link in links if link == f"mb{number}" or link.startswith(ours)]
    mark = f"/box-{name}/"
    found += [f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines() if mark in line]
    return found + [f"process {pid}: {command}" for pid, command in processes() if mark in command]


def processes() -> Iterator[tuple[int, str]]:
    """List all processes with their command lines."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            yield int(entry.name), os.fsdecode(b" ".join(words))


def ssh(box: Box, node: str, command: str, timeout_s: float = 15.0) -> "subprocess.CompletedProcess[str]":
    """Run a shell line in a node over ssh."""
    argv = [*box.ssh_argv(node)[:-1], "-o", "ConnectTimeout=2", node, command]
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL, check=False
    )
