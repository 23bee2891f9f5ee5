"""`muster hosts`: conversion of node lists and CloudLab manifests."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from muster.jobs.hosts.nodelist import expand, fold
from muster.launch.common.options import add_json, add_login


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands and their options."""
    parser.epilog = (
        "muster hosts 'n[01-16,20]'                      one host per line\n"
        "muster hosts from-manifest m.xml --login alice"
    )
    commands = parser.add_subparsers(metavar="COMMAND", dest="what", required=True)

    def add(name: str, text: str, do: Any) -> argparse.ArgumentParser:
        each = commands.add_parser(name, help=text, description=text + ".")
        each.set_defaults(do=do)
        add_json(each)
        return each

    lists = "node lists, such as 'n[01-16,20]'; - reads standard input"
    add("expand", "print the names in a node list, one per line", _expand).add_argument(
        "lists", metavar="LIST", nargs="+", help=lists
    )
    names = "names separated by spaces, commas or newlines; - reads standard input"
    add("fold", "print names as a short node list", _fold).add_argument("names", metavar="NAME", nargs="+", help=names)
    manifest = add("from-manifest", "print a CloudLab manifest as a hosts file", _from_manifest)
    manifest.add_argument("file", metavar="FILE", help="the manifest (XML)")
    add_login(manifest, "--login", "--user", help="user name on the nodes (default: your own)")
    manifest.add_argument("--lan", metavar="NAME", help="the LAN for the ranks (default: the LAN that joins all nodes)")


def run(args: argparse.Namespace) -> int:
    """Run the chosen conversion and print the result.

    Raises:
        UsageError, JobFileError: if a list, a file or a manifest is invalid.
    """
    data, text = args.do(args)
    print(json.dumps(data, indent=2) if args.json else text, end="\n" if args.json else "")
    return 0


def _expand(args: argparse.Namespace) -> tuple[Any, str]:
    names = _names(args.lists)
    return names, "".join(f"{name}\n" for name in names)


def _fold(args: argparse.Namespace) -> tuple[Any, str]:
    folded = fold(_names(args.names))
    return folded, f"{folded}\n"


def _names(words: Sequence[str]) -> list[str]:
    """Return the distinct names of several lists, in order."""
    lists = [part for word in words for part in (sys.stdin.read() if word == "-" else word).split()]
    # Pasted lists look like `a, b` or `a ,b`, so a word may end or begin with a comma, or be one.
    return expand(",".join(part for word in lists if (part := word.strip(","))))


def _from_manifest(args: argparse.Namespace) -> tuple[Any, str]:
    from muster.cloudlab.manifest import survey_manifest
    from muster.jobs.hosts.hosts import hostfile_text

    found = survey_manifest(Path(args.file), user=args.login, lan=args.lan)
    for warning in found.warnings:
        print(f"muster: {warning}", file=sys.stderr)
    network = f", network {found.network}" if found.network else ""
    head = f"# {args.file}: LAN {found.lan or '(none)'}{network}\n"
    records = [
        {
            **asdict(node.host),
            "address": node.host.address or None,
            "mac": node.mac or None,
            "control_address": node.control_address or None,
        }
        for node in found.nodes
    ]
    return {"lan": found.lan or None, "network": found.network or None, "hosts": records}, head + hostfile_text(
        found.hosts
    )
