"""A box in the hands of a program: what `muster box` does, as methods.

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
    """A box that was made, by its name."""

    name: str

    @property
    def state(self) -> BoxState:
        """What was last written about it.

        Raises:
            UsageError: it is not there (any more).
        """
        return find_box(self.name)

    @property
    def paths(self) -> BoxPaths:
        """Its files."""
        return BoxPaths.of(self.name)

    def hosts(self) -> HostSet:
        """Return its nodes as hosts to run a job on."""
        return box_hosts(self.name)

    def exec_argv(self, node: str, argv: Sequence[str], *, folder: str | None = None) -> list[str]:
        """Return the argv that runs a command in a node, in a folder (default: the current one).

        Raises:
            RefusedError: this is not root, or the node does not run.
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
        """Run a command in a node and return how it ended.

        Raises:
            RefusedError: this is not root, or the node does not run.
            subprocess.TimeoutExpired: it took too long, and was killed.
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
        """Return the argv of an ssh to a node; ssh joins the words of the command with spaces, as it always does.

        Raises:
            UsageError: there is no such node.
        """
        state = self.state
        return [state.programs["ssh"], "-F", str(self.paths.ssh_config), state.spec.check_node(node), *argv]

    def fail(self, node: str, how: str) -> None:
        """Let a node fail: power, kill, unplug or freeze.

        Raises:
            RefusedError: this is not root, or it cannot fail like that now.
        """
        with self._changing("fail") as (state, tools):
            failures.fail(state, node, how, tools)

    def heal(self, node: str) -> None:
        """Bring a node back, whatever it has; with Slurm, wait until the controller counts on it again.

        Raises:
            RefusedError: this is not root, or the node does not come back in time.
        """
        with self._changing("heal") as (state, tools):
            failures.heal(state, node, tools)

    def rate(self, rate: int | None, between: tuple[str, str] | None = None, *, of: str | None = None) -> None:
        """Set the speed of all links, of one pair of nodes, or of one node's link; bits a second each way.

        None is unlimited; of a pair or a node: as all others.

        Raises:
            RefusedError: this is not root, or tc failed.
        """
        with self._changing("rate") as (state, tools):
            if of is not None:
                rates = state.rates.with_node(state.spec.check_link(of), rate)
            elif between is None:
                rates = Rates(rate)  # slow pairs and nodes are forgotten
            else:
                one, other = (state.spec.check_link(node) for node in between)
                if one == other:
                    raise UsageError(f"box {self.name}: no link joins {one} with itself; name two nodes")
                rates = state.rates.with_pair(one, other, rate)
            changed = replace(state, rates=rates)
            write_state(changed)
            nodes.shape(changed, changed.spec.compute, tools)

    def status(self) -> status.BoxStatus:
        """Return how it is now."""
        return status.look(self.state)

    def down(self) -> bool:
        """Remove it; say whether there was anything.

        Raises:
            RefusedError: this is not root, or something does not go.
        """
        return take_down(self.name)

    @contextmanager
    def _changing(self, verb: str) -> Iterator[tuple[BoxState, Tools]]:
        machine.need_root(f"muster box {verb}")
        self.state  # noqa: B018 (says that there is none)
        with locked_folder(self.paths.path) as lock:
            state = read_state(self.name) if lock is not None else None
            if lock is None or state is None:
                raise RefusedError(f"box {self.name} was taken down just now")
            if not state.complete or state.is_stale:
                box_hosts(self.name)  # says why not
            yield state, Tools(state.programs, lock)


@contextmanager
def box_up(spec: BoxSpec) -> Iterator[Box]:
    """Make a box for as long as the context lasts.

    Raises:
        RefusedError: this machine cannot make it, or there is one of that name.
    """
    make(spec)
    try:
        yield Box(spec.name)
    finally:
        take_down(spec.name)
