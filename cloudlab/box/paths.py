"""Where a box keeps its files: one folder, root's, spelt here only.

    /var/lib/muster/box-NAME/
      state.json  hosts  ssh_config  sshd_config  known_hosts  authorized_keys  client_key  slurm.conf  cgroup.conf
      munge/  slurm/
      nodes/node0/     init.json (its process)  plan.json  passwd  host_key  home/  runs/  *.log  spool/

Not in /run, which is often mounted noexec and in memory: homes are here, and Slurm runs its scripts from here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path("/var/lib/muster")
NETNS: Final = Path("/run/netns")  # where `ip netns` keeps its names


@dataclass(frozen=True)
class NodePaths:
    """The files of one node."""

    folder: Path

    @property
    def init(self) -> Path:
        """Which process is the node's first: written by itself."""
        return self.folder / "init.json"

    @property
    def plan(self) -> Path:
        """What the node's first process does."""
        return self.folder / "plan.json"

    @property
    def passwd(self) -> Path:
        """The node's /etc/passwd."""
        return self.folder / "passwd"

    @property
    def host_key(self) -> Path:
        """The key that its sshd shows."""
        return self.folder / "host_key"

    @property
    def home(self) -> Path:
        """Root's home."""
        return self.folder / "home"

    @property
    def runs(self) -> Path:
        """The node's own run root, with private storage."""
        return self.folder / "runs"

    @property
    def spool(self) -> Path:
        """Where its slurmd keeps scripts."""
        return self.folder / "spool"

    def log(self, service: str) -> Path:
        """What a service of the node says."""
        return self.folder / f"{service}.log"


@dataclass(frozen=True)
class BoxPaths:
    """The files of one box."""

    folder: Path

    @staticmethod
    def of(name: str) -> "BoxPaths":
        """Return the paths of the box with a name, whether it is there or not."""
        return BoxPaths(ROOT / f"box-{name}")

    @property
    def state(self) -> Path:
        """What the box is, for all commands."""
        return self.folder / "state.json"

    @property
    def hosts(self) -> Path:
        """/etc/hosts of every node."""
        return self.folder / "hosts"

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F`, on the host and in the nodes."""
        return self.folder / "ssh_config"

    @property
    def sshd_config(self) -> Path:
        """Of every node's sshd."""
        return self.folder / "sshd_config"

    @property
    def known_hosts(self) -> Path:
        """The nodes' host keys."""
        return self.folder / "known_hosts"

    @property
    def authorized_keys(self) -> Path:
        """Who may log in: the client key."""
        return self.folder / "authorized_keys"

    @property
    def client_key(self) -> Path:
        """The key that logs in everywhere."""
        return self.folder / "client_key"

    @property
    def munge(self) -> Path:
        """Munge's folder: key, socket, log."""
        return self.folder / "munge"

    @property
    def munge_socket(self) -> Path:
        """What Slurm's programs are told to ask for credentials."""
        return self.munge / "socket"

    @property
    def slurm_conf(self) -> Path:
        """For SLURM_CONF; cgroup.conf lies beside it."""
        return self.folder / "slurm.conf"

    @property
    def cgroup_conf(self) -> Path:
        """Found by Slurm beside slurm.conf."""
        return self.folder / "cgroup.conf"

    @property
    def slurm(self) -> Path:
        """The controller's memory."""
        return self.folder / "slurm"

    @property
    def nodes(self) -> Path:
        """One folder for each node."""
        return self.folder / "nodes"

    def node(self, name: str) -> NodePaths:
        """Return the paths of one node."""
        return NodePaths(self.nodes / name)
