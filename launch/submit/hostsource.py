"""From the command line to the hosts: a file, a list, a manifest, a box, or what the site file names."""

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from jobs import hosts as hostfile
from jobs.errors import UsageError
from jobs.hosts import HostSet
from jobs.site import BOX, Site, SshSettings

SOURCES: Final = ("hosts", "nodelist", "manifest")
SSH_OPTION: Final = re.compile(r"[A-Za-z]+[ =].+")


def host_set(args: argparse.Namespace, site: Site) -> HostSet | None:
    """Return the hosts that were asked for, include and exclude applied; None where nobody names any.

    Raises:
        UsageError, JobFileError, RefusedError: they are named twice, or cannot be read.
    """
    given = [name for name in SOURCES if getattr(args, name, None)]
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
        from cloudlab.manifest import survey_manifest

        found = survey_manifest(Path(args.manifest), user=args.login or site.ssh.user, lan=args.lan)
        for warning in found.warnings:
            print(f"muster: warning: {warning}", file=sys.stderr)
        return HostSet(tuple(found.hosts), f"manifest {args.manifest}")
    named = args.hosts if source == "hosts" else site.hosts
    if named is None:
        return None
    if BOX.fullmatch(named):
        from cloudlab.box.hosts import box_hosts

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
