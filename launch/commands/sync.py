"""`muster sync`: a copy of this checkout on all hosts, with a check that all hosts have the same code."""

import argparse
import json
import sys

from muster.launch.common.options import add_hosts, add_json, given


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = "muster sync -H hosts.txt"
    parser.add_argument(
        "--to", metavar="DIR", help="folder on the hosts (default: code: in the site file, else the same path as here)"
    )
    parser.add_argument("--site", metavar="FILE", help="the site file, with the settings of the cluster")
    add_hosts(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Copy the code to all hosts and print the outcome of each.

    Raises:
        UsageError, JobFileError, RefusedError: if there are no hosts, or their list cannot be read.
        RunFolderError: if the code on this machine cannot be read.
    """
    from muster.jobs.basics.boot import CODE_ROOT
    from muster.jobs.basics.errors import UsageError
    from muster.launch.common.fingerprint import fingerprint
    from muster.launch.submit.hostsource import host_set, site_of
    from muster.launch.submit.prepare import interpreter_of
    from muster.launch.submit.request import Request
    from muster.launch.submit.sync import code_of, report, sync

    request = given(args, Request)
    site = site_of(request)
    hosts = host_set(request, site)
    if hosts is None:
        raise UsageError("no hosts; give -H FILE, -w 'n[01-04]', --manifest FILE, or hosts: in the site file")
    to = args.to or site.code or str(CODE_ROOT)
    if not to.startswith("/"):
        raise UsageError(f"--to: must be an absolute path on the hosts, got {to!r}")
    python = interpreter_of(site, here=False)
    outcomes = sync(hosts, site.ssh, to=to.rstrip("/") or "/", python=python, fanout=request.fanout)
    if args.json:
        print(json.dumps({"to": to, "code": fingerprint(), "hosts": [each.to_json() for each in outcomes]}, indent=2))
    else:
        print("\n".join(report(outcomes, to, fingerprint())))
    for each in outcomes:
        if each.error is not None:
            print(f"muster: {each.error}", file=sys.stderr)
    return code_of(outcomes)
