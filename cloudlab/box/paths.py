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

from muster.jobs.basics.places import At, Each

ROOT: Final = Path("/var/lib/muster")
NETNS: Final = Path("/run/netns")  # where `ip netns` keeps its names


@dataclass(frozen=True)
class NodePaths:
    """The files of one node."""

    path: Path

    init = At("init.json")  # which process is the node's first: written by itself
    plan = At("plan.json")  # what the node's first process does
    passwd = At("passwd")  # the node's /etc/passwd
    host_key = At("host_key")  # the key that its sshd shows
    home = At("home")  # root's home
    runs = At("runs")  # the node's own run root, with private storage
    spool = At("spool")  # where its slurmd keeps scripts
    log = Each("{}.log")  # what a service of the node says


@dataclass(frozen=True)
class BoxPaths:
    """The files of one box."""

    path: Path

    state = At("state.json")  # what the box is, for all commands
    hosts = At("hosts")  # /etc/hosts of every node
    ssh_config = At("ssh_config")  # for `ssh -F`, on the host and in the nodes
    sshd_config = At("sshd_config")  # of every node's sshd
    known_hosts = At("known_hosts")  # the nodes' host keys
    authorized_keys = At("authorized_keys")  # who may log in: the client key
    client_key = At("client_key")  # the key that logs in everywhere
    munge = At("munge")  # munge's folder: key, socket, log
    slurm_conf = At("slurm.conf")  # for SLURM_CONF; cgroup.conf lies beside it
    cgroup_conf = At("cgroup.conf")  # found by Slurm beside slurm.conf
    slurm = At("slurm")  # the controller's memory
    nodes = At("nodes")  # one folder for each node

    @staticmethod
    def of(name: str) -> "BoxPaths":
        """Return the paths of the box with a name, whether it is there or not."""
        return BoxPaths(ROOT / f"box-{name}")

    @property
    def munge_socket(self) -> Path:
        """What Slurm's programs are told to ask for credentials."""
        return self.munge / "socket"

    def node(self, name: str) -> NodePaths:
        """Return the paths of one node."""
        return NodePaths(self.nodes / name)
