"""The options of a run on the command line: job, changes to it, site, hosts and how to reach them."""

import json
import os
from dataclasses import dataclass
from typing import Final

from muster.jobs.basics.errors import UsageError
from muster.jobs.hosts.nodelist import expand
from muster.jobs.spec.failover import RestartSettings
from muster.jobs.spec.job import VARIABLE

SOURCES: Final = ("hosts", "nodelist", "manifest")
QUEUED: Final = ("slurm", "submitit")


@dataclass(frozen=True)
class Request:
    """The values of all options (launch/common/options.py). A field keeps its default if a command lacks its option."""

    job: str = ""
    job_text: str | None = None  # the text of a job, used instead of a job file
    program: tuple[str, ...] = ()  # the command from which job_text was made
    overrides: tuple[str, ...] = ()
    exported: tuple[str, ...] = ()
    nodes: int | None = None
    ranks_per_node: str | None = None
    restart: str | None = None
    name: str | None = None
    site: str | None = None
    runs: str | None = None
    on: str | None = "local"  # None: the hosts decide
    hosts: str | None = None
    nodelist: str | None = None
    manifest: str | None = None
    lan: str | None = None
    login: str | None = None
    include: str | None = None
    exclude: str | None = None
    fanout: int = 0
    jump: str | None = None
    cheap_kex: bool = False
    ssh_opt: tuple[str, ...] = ()
    master_addr: str | None = None
    iface: str | None = None
    port: int = 0

    @property
    def names_hosts(self) -> bool:
        """True when an option names hosts."""
        return any(getattr(self, source) for source in SOURCES)

    def changes(self) -> list[str]:
        """Convert the options that replace values of the job file into overrides.

        Raises:
            UsageError: if a variable is not valid, or Slurm cannot choose hosts in this way.
        """
        found = list(self.overrides)
        if self.name is not None:
            found.append(f"name={json.dumps(self.name)}")
        if self.nodes is not None:
            found.append(f"nodes={self.nodes}")
        if self.ranks_per_node is not None:
            found.append(f"ranks_per_node={self.ranks_per_node}")
        if self.on in QUEUED:
            found += self._choice_of_slurm()
        if self.restart is not None:
            most = RestartSettings.model_fields["max"].default if self.restart == "default" else self.restart
            found.append(f"restart.max={most}")
        return found + [_variable(word) for word in self.exported]

    def _choice_of_slurm(self) -> list[str]:
        """Convert the options that choose hosts into overrides for Slurm, which makes the choice."""
        if self.include:
            raise UsageError(
                "--include: Slurm chooses the nodes; name them all with -w LIST, or leave some out with -e LIST"
            )
        wanted = {"exclude": self.exclude, "nodelist": self.nodelist}
        return [f"slurm.{key}={json.dumps(','.join(expand(text)))}" for key, text in wanted.items() if text]


def _variable(word: str) -> str:
    """Convert a variable for the ranks, NAME or NAME=VALUE, to an override."""
    name, is_given, value = word.partition("=")
    if not VARIABLE.fullmatch(name):
        raise UsageError(f"-x {word}: a variable's name has letters, digits and _, and does not begin with a digit")
    if not is_given and name not in os.environ:
        raise UsageError(f"-x {name}: is not set here; write -x {name}=VALUE")
    value = value if is_given else os.environ[name]
    # surrogates, by which Python represents bytes that are not UTF-8
    if any("\ud800" <= each <= "\udfff" for each in value):
        raise UsageError(f"-x {name}: its value is not UTF-8, as job files must be; leave it out")
    return f"env.{name}={json.dumps(value)}"
