"""From the command line to the hosts: a file, a list, a manifest, a box, or what the site file names."""

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from muster.jobs.basics.errors import UsageError
from muster.jobs.hosts import hosts as hostfile
from muster.jobs.hosts.hosts import HostSet
from muster.jobs.spec.site import BOX, Site, SshSettings

SOURCES: Final = ("hosts", "nodelist", "manifest")
SSH_OPTION: Final = re.compile(r"[A-Za-z]+[ =].+")
OVER_SSH: Final = ("ssh", "pdsh")
QUEUED: Final = ("slurm", "submitit")
# The options that only some transports read.
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


def check_options(args: argparse.Namespace, transport: str) -> None:
    """Refuse the options that a transport does not read.

    Raises:
        UsageError: an option would have no effect.
    """
    for name, transports in READ_BY.items():
        if not getattr(args, name, None) or transport in transports:
            continue
        option = f"--{name.replace('_', '-')}"
        if transport == "local" and args.on is None and "ssh" in transports:
            raise UsageError(
                f"{option}: has no effect, because no hosts are named and the job would run on this machine; "
                "add -H, -w, --manifest, or hosts: in the site file, or leave it out"
            )
        raise UsageError(f"{option}: has no effect with --on {transport}; it is for {', '.join(transports)}; remove it")


def host_set(args: argparse.Namespace, site: Site) -> HostSet | None:
    """Return the hosts that were asked for, include and exclude applied; None where nobody names any.

    Raises:
        UsageError, JobFileError, RefusedError: they are named twice, or cannot be read.
    """
    given = [name for name in SOURCES if getattr(args, name, None)]
    if args.lan and "manifest" not in given:
        raise UsageError(f"--lan {args.lan}: names a network of a manifest; add --manifest FILE, or remove it")
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} both name the hosts; keep one of them")
    found = _read(args, given[0] if given else "", site)
    if found is None:
        if args.include or args.exclude:
            raise UsageError("--include and --exclude choose among hosts, and none are given; add -H, -w or --manifest")
        return None
    return replace(found, hosts=tuple(hostfile.choose(found.hosts, args.include, args.exclude)))


def _read(args: argparse.Namespace, source: str, site: Site) -> HostSet | None:
    if source == "nodelist":
        return HostSet(tuple(hostfile.from_nodelist(args.nodelist)), f"-w {args.nodelist}")
    if source == "manifest":
        from muster.cloudlab.manifest import survey_manifest

        found = survey_manifest(Path(args.manifest), user=args.login or site.ssh.user, lan=args.lan)
        for warning in found.warnings:
            print(f"muster: warning: {warning}", file=sys.stderr)
        return HostSet(tuple(found.hosts), f"manifest {args.manifest}")
    named = args.hosts if source == "hosts" else site.hosts
    if named is None:
        return None
    if BOX.fullmatch(named):
        from muster.cloudlab.box.hosts import box_hosts

        return box_hosts(named.partition(":")[2] or None)
    return HostSet(tuple(hostfile.read_hostfile(Path(named))), f"hosts file {named}")


def ssh_settings(args: argparse.Namespace, site: Site) -> SshSettings:
    """Lay what the command line says of ssh over what the site file says.

    Raises:
        UsageError: an option is not of ssh's form.
    """
    for option in args.ssh_opt:
        if not SSH_OPTION.fullmatch(option):
            raise UsageError(f"--ssh-opt: must be NAME=VALUE, as for ssh -o, got {option!r}")
    given = {
        "jump": args.jump,
        "user": args.login,
        "cheap_kex": args.cheap_kex or None,
        "options": [*args.ssh_opt, *site.ssh.options] if args.ssh_opt else None,
    }
    return site.ssh.model_copy(update={name: value for name, value in given.items() if value is not None})
