"""The site file: settings of a cluster rather than of a job. The file and all its keys are optional."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationInfo, field_validator

from muster.jobs.basics.errors import JobFileError, UsageError
from muster.jobs.basics.files import expanded
from muster.jobs.basics.hostnames import check_jump, check_network, check_user
from muster.jobs.hosts.nodelist import expand
from muster.jobs.spec import mistakes, yamlfile
from muster.jobs.spec.job import Variable
from muster.jobs.spec.passable import Passable
from muster.jobs.spec.python import Python, absolute
from muster.jobs.spec.slurm import SlurmSettings
from muster.jobs.spec.strict import Strict

SITE_VARIABLE: Final = "MUSTER_SITE"
PATHS: Final = ("interpreter", "code", "runs", "data")
BOX: Final = re.compile(r"box(:[\w.-]+)?")


class SshSettings(Strict):
    """How ssh reaches the hosts, in addition to the user's own ssh configuration."""

    user: str | None = Field(None, description="the user's name on the nodes", examples=["alice"])
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(None, description="the port of sshd", examples=[2222])
    jump: str | None = Field(
        None, description="a host to connect through, as for `ssh -J`", examples=["login.example.org"]
    )
    options: list[str] = Field(
        default_factory=list, description="as for `ssh -o`", examples=[["IdentityFile=~/.ssh/cluster"]]
    )
    connect_timeout_s: int = Field(8, ge=1, description="time limit for a connection, in seconds")
    cheap_kex: bool = Field(
        False,
        description="prefer curve25519, which takes an eighth of the CPU time of the post-quantum key exchange",
    )

    @field_validator("user", "jump")
    @classmethod
    def _are_names(cls, given: str | None, field: ValidationInfo) -> str | None:
        try:
            return given and (check_user if field.field_name == "user" else check_jump)(given)
        except UsageError as error:
            raise ValueError(str(error)) from error

    @field_validator("options")
    @classmethod
    def _are_options(cls, options: list[str]) -> list[str]:
        for option in options:
            if not re.fullmatch(r"[A-Za-z]+[ =].+", option):
                raise ValueError(f"each must be Name=value, as for ssh -o, got {option!r}")
        return options


class Site(Strict):
    """The settings of one cluster: its folders, how to reach its nodes, and defaults for jobs."""

    interpreter: str | None = Field(
        None, description="Muster's own Python on the nodes", examples=["/opt/muster/.venv/bin/python"]
    )
    python: Python | None = Field(None, examples=["/shared/envs/torch/bin/python"])
    code: str | None = Field(
        None, description="Muster's folder on the nodes; default: the same path as here", examples=["/opt/muster"]
    )
    runs: str | None = Field(None, description="the folder of runs; default: ./runs", examples=["/shared/runs"])
    data: str | None = Field(
        None, description="the folder of data sets; default: ~/.cache/muster", examples=["/shared/data"]
    )
    hosts: str | None = Field(
        None,
        description="a hosts file, `box`, or `box:NAME`; jobs run there over ssh unless `--on` is given",
        examples=["hosts.txt"],
    )
    iface: str | None = Field(
        None, description="the network of the ranks: an interface, or a CIDR", examples=["10.10.1.0/24"]
    )
    ssh: SshSettings = Field(SshSettings(), description="how ssh reaches the hosts", examples=[{"user": "alice"}])
    slurm: SlurmSettings = Field(
        SlurmSettings(), description="as in a job file, which takes precedence", examples=[{"partition": "batch"}]
    )
    env: dict[Variable, Passable] = Field(
        default_factory=dict, description="environment variables of every rank", examples=[{"NCCL_DEBUG": "WARN"}]
    )
    setup: list[str] = Field(
        default_factory=list,
        description="shell lines, run on each node before a job's own",
        examples=[["module load cuda"]],
    )
    failure_domains: list[str] = Field(
        default_factory=list,
        description="node lists of hosts that fail together, such as those of a rack; a node does not keep the copies "
        "of another node of its list",
        examples=[["n[01-16]", "n[17-32]"]],
    )
    share: Literal["group"] | None = Field(
        None, description="group: members of your Unix group may read your runs; default: only you may"
    )

    @field_validator("iface")
    @classmethod
    def _is_a_network(cls, iface: str | None) -> str | None:
        try:
            return iface and check_network(iface)
        except UsageError as error:
            raise ValueError(str(error)) from error

    @field_validator("failure_domains")
    @classmethod
    def _are_node_lists(cls, given: list[str]) -> list[str]:
        for each in given:
            try:
                expand(each)
            except UsageError as error:
                raise ValueError(str(error)) from error
        return given

    @field_validator("interpreter", "code")
    @classmethod
    def _is_absolute(cls, path: str | None) -> str | None:
        if path is not None and not path.startswith("/"):
            raise ValueError(f"must be an absolute path, got {path!r}; for example /usr/bin/python3")
        return path


@dataclass(frozen=True)
class SitePath:
    """The path of the site file and the option that set it. Only a file at the default path is optional."""

    path: Path
    origin: str
    required: bool


def site_path(given: str | None, environ: Mapping[str, str] = os.environ) -> SitePath:
    """Choose the site file: the given one, else MUSTER_SITE, else the one in the user's configuration folder."""
    if given:
        return SitePath(Path(given), "--site", required=True)
    if named := environ.get(SITE_VARIABLE):
        return SitePath(Path(named), SITE_VARIABLE, required=True)
    # The XDG base directory specification: a relative XDG_CONFIG_HOME must be ignored.
    folder = Path(environ.get("XDG_CONFIG_HOME", ""))
    if not folder.is_absolute():
        folder = Path(environ.get("HOME") or Path.home()) / ".config"
    return SitePath(folder / "muster" / "site.yaml", "default", required=False)


def load_site(given: str | None, environ: Mapping[str, str] = os.environ) -> Site:
    """Load the site file chosen by `site_path`, or return the defaults if there is none.

    Relative `runs` and `data` are relative to the folder of the site file; `~` is the home folder.

    Raises:
        JobFileError: if a file that was asked for is missing, or the file is wrong; one line per mistake.
    """
    chosen = site_path(given, environ)
    try:
        document = yamlfile.read(chosen.path)
    except FileNotFoundError as error:
        if not chosen.required:
            return Site()
        raise JobFileError(f"{chosen.path}: no such file; {chosen.origin} names it as the site file") from error
    if document.value is None and not document.mistakes:
        return Site()  # a file with only comments
    site = mistakes.check(Site, _absolute(document.mapping(), chosen.path.parent.absolute()), document)
    document.raise_mistakes()
    assert site is not None, "the site file is invalid, but no mistake was recorded"
    return site


def placed(given: str | None, message: str) -> str:
    """Prefix a message with the place, in the site file, of the key that the message begins with."""
    return yamlfile.read(site_path(given).path).placed(message)


def _absolute(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make paths absolute. A relative interpreter or code folder stays relative, so that validation refuses it."""
    for key in PATHS:
        value = raw.get(key)
        if isinstance(value, str) and value:
            path = expanded(value)
            raw[key] = str(path if key in ("interpreter", "code") else folder / path)
    if "python" in raw:
        raw["python"] = absolute(raw["python"], folder)
    hosts = raw.get("hosts")
    if isinstance(hosts, str) and hosts and not BOX.fullmatch(hosts):
        raw["hosts"] = str(folder / expanded(hosts))
    return raw
