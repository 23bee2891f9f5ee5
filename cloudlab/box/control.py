"""The commands of `muster box` as methods, for use in programs.

with box_up(BoxSpec(name="four", slurm=True)) as box:
    box.exec("node1", ["hostname"])
    box.fail("node2", "power")
"""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from muster.cloudlab.box import failures, machine, nodes, status, texts
from muster.cloudlab.box.hosts import box_hosts, find_box, name_flag
from muster.cloudlab.box.make import make
from muster.cloudlab.box.paths import BoxPaths
from muster.cloudlab.box.plan import session_environment
from muster.cloudlab.box.remove import take_down
from muster.cloudlab.box.spec import BoxSpec, Rates
from muster.cloudlab.box.state import BoxState, locked_folder, read_state, write_state
from muster.cloudlab.box.tools import Tools
from muster.jobs.basics.errors import RefusedError, UsageError
from muster.jobs.hosts.hosts import HostSet

EXEC_S = 60.0


@dataclass(frozen=True)
class Box:
    """A handle to an existing box, by its name."""

    name: str

    @property
    def state(self) -> BoxState:
        """The last written state of the box.

        Raises:
            UsageError: if the box does not exist.
        """
        return find_box(self.name)

    @property
    def paths(self) -> BoxPaths:
        """The paths of the box's files."""
        return BoxPaths.of(self.name)

    def hosts(self) -> HostSet:
        """Return the box's nodes as hosts that can run a job."""
        return box_hosts(self.name)

    def exec_argv(self, node: str, argv: Sequence[str], *, folder: str | None = None) -> list[str]:
        """Return the argv that runs a command in a node, in a folder (default: the current one).

        Raises:
            RefusedError: if the caller is not root, or the node is not running.
        """
        machine.need_root("muster box exec")
        state = self.state
        init = nodes.living(state, state.spec.check_node(node))
        if init.is_stopped:
            raise RefusedError(f"{node} is frozen; try: sudo muster box heal {node}{name_flag(self.name)}")
        session = session_environment(state.spec, self.paths, node, state.faketime)
        environment = {"HOME": str(self.paths.node(node).home), **session}
        return texts.exec_argv(
            state.programs["nsenter"], init.pid, argv, folder=folder or str(Path.cwd()), environment=environment
        )

    def exec(
        self,
        node: str,
        argv: Sequence[str],
        *,
        folder: str | None = None,
        timeout_s: float = EXEC_S,
        environment: Mapping[str, str] | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command in a node and return its exit code and output.

        Raises:
            RefusedError: if the caller is not root, or the node is not running.
            subprocess.TimeoutExpired: if the command took too long and was killed.
        """
        return subprocess.run(
            self.exec_argv(node, argv, folder=folder),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, **(environment or {})},
            check=False,
        )

    def ssh_argv(self, node: str, argv: Sequence[str] = ()) -> list[str]:
        """Return the argv that runs ssh to a node. ssh joins the words of `argv` with spaces.

        Raises:
            UsageError: if there is no such node.
        """
        state = self.state
        return [state.programs["ssh"], "-F", str(self.paths.ssh_config), state.spec.check_node(node), *argv]

    def fail(self, node: str, how: str) -> None:
        """Make a node fail; `how` is power, kill, unplug or freeze.

        Raises:
            RefusedError: if the caller is not root, or the node cannot fail in that way now.
        """
        with self._changing("fail") as (state, tools):
            failures.fail(state, node, how, tools)

    def heal(self, node: str) -> None:
        """Undo any failure of a node; with Slurm, wait until the controller can use it again.

        Raises:
            RefusedError: if the caller is not root, or the node does not come back in time.
        """
        with self._changing("heal") as (state, tools):
            failures.heal(state, node, tools)

    def rate(self, rate: int | None, between: tuple[str, str] | None = None, *, of: str | None = None) -> None:
        """Set the speed of all links, of one pair of nodes, or of one node's link, in bits per second each way.

        A speed of None removes the limit of all links, or the separate limit of a pair or node.

        Raises:
            RefusedError: if the caller is not root, or `tc` failed.
        """
        with self._changing("rate") as (state, tools):
            if of is not None:
                rates = state.rates.with_node(state.spec.check_link(of), rate)
            elif between is None:
                rates = Rates(rate)  # this drops the separate rates of pairs and nodes
            else:
                one, other = (state.spec.check_link(node) for node in between)
                if one == other:
                    raise UsageError(f"box {self.name}: no link connects {one} with itself; name two different nodes")
                rates = state.rates.with_pair(one, other, rate)
            changed = replace(state, rates=rates)
            write_state(changed)
            nodes.shape(changed, changed.spec.compute, tools)

    def status(self) -> status.BoxStatus:
        """Return the current status of the box."""
        return status.look(self.state)

    def down(self) -> bool:
        """Remove the box; return whether it existed.

        Raises:
            RefusedError: if the caller is not root, or a part cannot be removed.
        """
        return take_down(self.name)

    @contextmanager
    def _changing(self, verb: str) -> Iterator[tuple[BoxState, Tools]]:
        machine.need_root(f"muster box {verb}")
        self.state  # noqa: B018 (raises if there is no box)
        with locked_folder(self.paths.path) as lock:
            state = read_state(self.name) if lock is not None else None
            if lock is None or state is None:
                raise RefusedError(f"box {self.name} was just taken down")
            if not state.complete or state.is_stale:
                box_hosts(self.name)  # this raises the error for an unusable box
            yield state, Tools(state.programs, lock)


@contextmanager
def box_up(spec: BoxSpec) -> Iterator[Box]:
    """Make a box, and remove it at the end of the context.

    Raises:
        RefusedError: if this machine cannot make the box, or a box of that name exists.
    """
    make(spec)
    try:
        yield Box(spec.name)
    finally:
        take_down(spec.name)
