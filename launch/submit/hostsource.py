"""The hosts of a run, from the command line or the site file: a file, a list, a manifest, or a box."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from muster.jobs.basics.errors import UsageError
from muster.jobs.hosts import hosts as hostfile
from muster.jobs.hosts.hosts import HostSet
from muster.jobs.spec.site import BOX, Site, load_site
from muster.launch.submit.request import QUEUED, SOURCES, Request

SSH_OPTION: Final = re.compile(r"[A-Za-z]+[ =].+")
OVER_SSH: Final = ("ssh", "pdsh")
# The options that only some transports use, and those transports.
READ_BY: Final = {
    "login": OVER_SSH,
    "jump": OVER_SSH,
    "cheap_kex": OVER_SSH,
    "ssh_opt": OVER_SSH,
    "fanout": OVER_SSH,
    "include": (*OVER_SSH, "hand", *QUEUED),
    "exclude": (*OVER_SSH, "hand", *QUEUED),
    "iface": (*OVER_SSH, "hand", *QUEUED),
    "port": ("hand",),
}


def check_options(request: Request, transport: str) -> None:
    """Refuse options that the transport does not use.

    Raises:
        UsageError: if an option would have no effect.
    """
    for name, transports in READ_BY.items():
        if not getattr(request, name) or transport in transports:
            continue
        option = f"--{name.replace('_', '-')}"
        if transport == "local" and request.on is None and "ssh" in transports:
            raise UsageError(
                f"{option}: has no effect, because no hosts are named and the job would run on this machine; "
                "add -H, -w, --manifest, or hosts: in the site file, or leave it out"
            )
        raise UsageError(f"{option}: has no effect with --on {transport}; it is for {', '.join(transports)}; remove it")


def host_set(request: Request, site: Site) -> HostSet | None:
    """Return the requested hosts, after `--include` and `--exclude`; None if no hosts are named.

    Raises:
        UsageError, JobFileError, RefusedError: if the hosts are named twice, or cannot be read.
    """
    given = [name for name in SOURCES if getattr(request, name)]
    if request.lan and "manifest" not in given:
        raise UsageError(f"--lan {request.lan}: names a network of a manifest; add --manifest FILE, or remove it")
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} both name the hosts; keep one of them")
    found = _read(request, site)
    if found is None:
        if request.include or request.exclude:
            raise UsageError("--include and --exclude choose among hosts, but none are given; add -H, -w or --manifest")
        return None
    return replace(found, hosts=tuple(hostfile.choose(found.hosts, request.include, request.exclude)))


def _read(request: Request, site: Site) -> HostSet | None:
    if request.nodelist:
        return HostSet(tuple(hostfile.from_nodelist(request.nodelist)), f"-w {request.nodelist}")
    if request.manifest:
        from muster.cloudlab.manifest import survey_manifest

        found = survey_manifest(Path(request.manifest), user=request.login or site.ssh.user, lan=request.lan)
        for warning in found.warnings:
            print(f"muster: warning: {warning}", file=sys.stderr)
        return HostSet(tuple(found.hosts), f"manifest {request.manifest}")
    named = request.hosts or site.hosts
    if named is None:
        return None
    if BOX.fullmatch(named):
        from muster.cloudlab.box.hosts import box_hosts

        return box_hosts(named.partition(":")[2] or None)
    return HostSet(tuple(hostfile.read_hostfile(Path(named))), f"hosts file {named}")


def site_of(request: Request) -> Site:
    """Load the site file, and override its ssh settings with those of the command line.

    Raises:
        JobFileError: if the file is invalid.
        UsageError: if an ssh option is not NAME=VALUE.
    """
    site = load_site(request.site)
    for option in request.ssh_opt:
        if not SSH_OPTION.fullmatch(option):
            raise UsageError(f"--ssh-opt: must be NAME=VALUE, as for ssh -o, got {option!r}")
    given = {
        "jump": request.jump,
        "user": request.login,
        "cheap_kex": request.cheap_kex or None,
        "options": [*request.ssh_opt, *site.ssh.options] if request.ssh_opt else None,
    }
    ssh = site.ssh.model_copy(update={name: value for name, value in given.items() if value is not None})
    return site.model_copy(update={"ssh": ssh})
