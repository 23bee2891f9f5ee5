"""The paths of a box's files, which are in one folder owned by root. No other module contains these paths.

    /var/lib/muster/box-NAME/
      state.json  hosts  ssh_config  sshd_config  known_hosts  authorized_keys  client_key  slurm.conf  cgroup.conf
      munge/  slurm/
      nodes/node0/     init.json (its process)  plan.json  passwd  host_key  home/  runs/  *.log  spool/

The folder is not in /run, which is often in memory and mounted noexec: the folder contains home folders,
and scripts that Slurm runs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster.jobs.basics.places import At, Each

ROOT: Final = Path("/var/lib/muster")
NETNS: Final = Path("/run/netns")  # folder in which `ip netns` keeps its namespaces


@dataclass(frozen=True)
class NodePaths:
    """The files of one node."""

    path: Path

    init = At("init.json")  # the pid and start time of the node's first process
    plan = At("plan.json")  # the plan for the node's first process
    passwd = At("passwd")  # the node's /etc/passwd
    host_key = At("host_key")  # the host key of its sshd
    home = At("home")  # root's home
    runs = At("runs")  # the node's own folder of runs, if storage is private
    spool = At("spool")  # spool folder of its slurmd
    log = Each("{}.log")  # log of a service of the node


@dataclass(frozen=True)
class BoxPaths:
    """The files of one box."""

    path: Path

    state = At("state.json")  # the state of the box, for all commands
    hosts = At("hosts")  # /etc/hosts of every node
    ssh_config = At("ssh_config")  # configuration for `ssh -F`, on the host and in the nodes
    sshd_config = At("sshd_config")  # configuration of every node's sshd
    known_hosts = At("known_hosts")  # the nodes' host keys
    authorized_keys = At("authorized_keys")  # the client key
    client_key = At("client_key")  # the key for logging in to all nodes
    munge = At("munge")  # munge's folder, with its key, socket and log
    slurm_conf = At("slurm.conf")  # the file named by the variable SLURM_CONF
    cgroup_conf = At("cgroup.conf")  # Slurm finds it beside slurm.conf
    slurm = At("slurm")  # the controller's saved state
    nodes = At("nodes")  # one folder for each node

    @staticmethod
    def of(name: str) -> "BoxPaths":
        """Return the paths of the named box, which may not exist."""
        return BoxPaths(ROOT / f"box-{name}")

    @property
    def munge_socket(self) -> Path:
        """The socket that Slurm's programs use for credentials."""
        return self.munge / "socket"

    def node(self, name: str) -> NodePaths:
        """Return the paths of one node."""
        return NodePaths(self.nodes / name)
