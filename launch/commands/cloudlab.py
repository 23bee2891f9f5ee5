"""`muster cloudlab rspec`: the RSpec of a CloudLab profile that requests nodes, built by `cloudlab/rspec.py`."""

import argparse

from muster.cloudlab import rspec


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = "muster cloudlab rspec --nodes 8 -o profile.rspec"
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    make = commands.add_parser("rspec", help="print the RSpec of a profile")
    make.add_argument("--nodes", type=int, default=4, metavar="N", help="number of nodes for ranks (default: 4)")
    make.add_argument(
        "--hardware", default=rspec.HARDWARE, metavar="TYPE", help="node type, or any (default: %(default)s)"
    )
    make.add_argument("--image", default=rspec.IMAGE, metavar="URN", help="disk image (default: Ubuntu 22.04)")
    make.add_argument("--lan", default=rspec.LAN, metavar="NAME", help="name of the LAN (default: %(default)s)")
    make.add_argument(
        "--lan-bandwidth",
        default="10gbit",
        metavar="RATE",
        help="bandwidth of the LAN, such as 25gbit, or any (default: %(default)s)",
    )
    make.add_argument(
        "--nfs",
        type=int,
        nargs="?",
        const=100,
        default=0,
        metavar="GB",
        help=f"add an NFS node that shares the folder {rspec.SHARED}, with GB gigabytes (default: 100)",
    )
    make.add_argument(
        "--repository",
        metavar="URL",
        help="clone this repository at boot; only for profiles not created from a repository",
    )
    make.add_argument("-o", "--output", metavar="FILE", help="write to a file")


def run(args: argparse.Namespace) -> int:
    """Print the RSpec, or write it to a file.

    Raises:
        UsageError: if a value is out of range.
        RunFolderError: if the file cannot be written.
    """
    text = rspec.rspec_text(
        rspec.RspecSpec(
            nodes=args.nodes,
            hardware="" if args.hardware == "any" else args.hardware,
            image=args.image,
            lan=args.lan,
            kbit_per_s=None if args.lan_bandwidth == "any" else rspec.rate(args.lan_bandwidth),
            nfs_gb=args.nfs,
            repository=args.repository,
        )
    )
    if args.output is None:
        print(text, end="")
    else:
        from muster.launch.common.screen import save

        save(args.output, text)
    return 0
