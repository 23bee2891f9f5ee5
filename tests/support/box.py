"""A box for the tests that need several hosts: made once a session, by the command that users have."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from muster.cloudlab.box.hosts import box_hosts
from muster.jobs.hosts.hosts import HostSet

CALL_S = 60.0


class LiveBox:
    """A box that is up. Nodes are entered over ssh, as a user would."""

    def __init__(self, name: str, *options: str, runs: Path | None = None) -> None:
        self.name = name
        self.runs = runs
        self.command("down", "--name", name)  # of a session that was killed
        up = self.command("up", "--name", name, "--nodes", "4", *options)
        assert up.returncode == 0, up.stderr
        self.hosts: HostSet = box_hosts(name)
        self.environment: Mapping[str, str] = self.hosts.environment

    @property
    def spelt(self) -> str:
        """What --hosts is given."""
        return f"box:{self.name}"

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Call `muster box`."""
        argv = [sys.executable, "-m", "muster", "box", *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=CALL_S, check=False)

    def argv(self, node: str, argv: Sequence[str]) -> list[str]:
        """The command that runs something on a node."""
        return ["ssh", *self.hosts.ssh_options, node, shlex.join(argv)]

    def exec(self, node: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run something on a node."""
        return subprocess.run(self.argv(node, argv), capture_output=True, text=True, timeout=CALL_S, check=False)

    def client(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm's from this machine."""
        env = {**os.environ, **self.environment}
        return subprocess.run(argv, capture_output=True, text=True, timeout=CALL_S, check=False, env=env)

    def fail(self, node: str, how: str) -> None:
        """Break a node."""
        done = self.command("fail", node, "--how", how, "--name", self.name)
        assert done.returncode == 0, done.stderr

    def heal(self, node: str) -> None:
        """Mend a node."""
        done = self.command("heal", node, "--name", self.name)
        assert done.returncode == 0, done.stderr

    def status(self) -> dict[str, object]:
        """What `muster box status` says."""
        found: dict[str, object] = json.loads(self.command("status", "--json", "--name", self.name).stdout)
        return found

    def down(self) -> None:
        """Take it down."""
        done = self.command("down", "--name", self.name)
        assert done.returncode == 0, done.stderr
