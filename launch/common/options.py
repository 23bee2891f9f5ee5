"""Options that several subcommands share."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeVar

from muster.jobs.basics.errors import UsageError

if TYPE_CHECKING:
    from muster.jobs.runfolder.rundir import RunDir

TRANSPORTS: Final = ("local", "ssh", "pdsh", "hand", "slurm", "submitit")


class IsDataclass(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Asked = TypeVar("Asked", bound=IsDataclass)


def given(args: argparse.Namespace, kind: type[Asked]) -> Asked:
    """Build a request from parsed arguments. Each field takes the option of the same name, if the command has one."""
    names = [name for name in kind.__dataclass_fields__ if hasattr(args, name)]
    values = {name: getattr(args, name) for name in names}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def the_run(args: argparse.Namespace, *, unique: bool = False) -> "RunDir":
    """Find the run named on the command line. Errors as for `jobs.runfolder.rundir.find_run`."""
    from muster.jobs.runfolder.rundir import find_run, runs_root

    return find_run(runs_root(args.runs), args.run, unique=unique)


def add_request(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run: a job or a program, changes to it, the hosts and how to reach them."""
    add_job(parser, program=True)
    add_runs(parser)
    add_transport(parser)


def add_runs(parser: argparse._ActionsContainer) -> None:
    """Add `--runs DIR`, the folder of all runs."""
    parser.add_argument("--runs", metavar="DIR", help="folder of all runs (default: MUSTER_RUNS, else ./runs)")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the optional argument that names a run."""
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help="the run's id, a part of it, or its folder (default: the newest run)"
    )
    add_runs(parser)


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add `--json`, which prints data on standard output and messages on standard error."""
    parser.add_argument("--json", action="store_true", help="print data as JSON")


def add_job(parser: argparse.ArgumentParser, *, program: bool = False) -> None:
    """Add the job file and the options that change it. With `program`, a program may replace the job file."""
    what = "the job file (YAML), or a script with arguments, such as train.py --lr 0.1; put -- before other programs"
    parser.add_argument("job", metavar="JOB", help=what if program else "the job file (YAML)")
    add_changes(parser)
    if program:
        parser.set_defaults(program=())  # launch/common/program_words.py replaces this default
        restart = "as --set restart.max=MAX (without a number: the default)"
        parser.add_argument("--restart", metavar="MAX", nargs="?", const="default", type=_restarts, help=restart)
    add_site_and_name(parser)


def add_site_and_name(parser: argparse.ArgumentParser) -> None:
    """Add `--site` and `--name`."""
    parser.add_argument("--site", metavar="FILE", help="the site file, which describes this cluster")
    parser.add_argument("--name", help="name of the run (default: the job's)")


def add_changes(parser: argparse._ActionsContainer) -> None:
    """Add the options that each change one value of a job."""
    add_overrides(parser)
    parser.add_argument("-N", "--nodes", metavar="N", type=int, help="as --set nodes=N")
    parser.add_argument("-n", "--ranks-per-node", metavar="M", help="as --set ranks_per_node=M (a number or slots)")


def add_set(parser: argparse._ActionsContainer, example: str = "train.optimizer.lr=0.1") -> None:
    """Add `--set KEY=VALUE`."""
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help=f"override one value of the job, as in {example}; may be repeated",
    )


def add_overrides(parser: argparse._ActionsContainer) -> None:
    """Add the options that change a job's values by key and set its ranks' environment variables."""
    add_set(parser)
    parser.add_argument(
        *("-x", "--env"),
        metavar="NAME[=VALUE]",
        action="append",
        default=[],
        dest="exported",
        help="set an environment variable of the ranks; without a value, copy yours; may be repeated",
    )


def add_transport(parser: argparse.ArgumentParser) -> None:
    """Add the options for the transport, the hosts and the network."""
    parser.add_argument("--on", choices=TRANSPORTS, help="transport (default: ssh if hosts are named, else local)")
    add_hosts(parser)
    add_network(parser)


def add_network(parser: argparse.ArgumentParser) -> None:
    """Add the options for the network over which the ranks meet."""
    network = parser.add_argument_group("network")
    network.add_argument("--master-addr", metavar="ADDRESS", help="address of node 0 at which the ranks meet")
    network.add_argument(
        "--iface",
        metavar="IF|CIDR",
        type=_iface,
        help="network of the ranks: an interface, or a CIDR such as 10.10.1.0/24",
    )
    network.add_argument("--port", metavar="P", type=_port, default=0, help="with --on hand: the supervisor's port")


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the options that name hosts, and those for ssh."""
    hosts = parser.add_argument_group("hosts")
    hosts.add_argument("-H", "--hosts", metavar="FILE", help="hosts file (ours, DeepSpeed's, MPI's); box or box:NAME")
    hosts.add_argument("-w", "--nodelist", metavar="LIST", help="host names, such as 'n[01-16,20]'")
    hosts.add_argument("--manifest", metavar="FILE", help="manifest of a CloudLab experiment (XML)")
    hosts.add_argument("--lan", metavar="NAME", help="name of the ranks' network in the manifest")
    add_login(hosts, "--login", help="user name on the hosts")
    hosts.add_argument("-i", "--include", metavar="LIST", help="use only these hosts")
    hosts.add_argument("-e", "--exclude", metavar="LIST", help="leave out these hosts")
    hosts.add_argument(
        "-f", "--fanout", metavar="N", type=int, default=0, help="hosts started at the same time (default: 64)"
    )
    hosts.add_argument("--jump", metavar="HOST", type=_jump, help="reach the hosts through this one, as with ssh -J")
    hosts.add_argument("--cheap-kex", action="store_true", help="make ssh try the cheap key exchange curve25519 first")
    hosts.add_argument(
        "--ssh-opt", metavar="NAME=VALUE", action="append", default=[], help="passed to ssh -o; may be repeated"
    )


def add_login(parser: argparse._ActionsContainer, *names: str, help: str) -> None:
    """Add `--login USER`."""
    parser.add_argument(*names, metavar="USER", type=_login, help=help)


def whole(option: str, *, least: int) -> Callable[[str], int]:
    """Return the argparse type of a whole number that is at least `least`."""

    def read(given: str) -> int:
        if (number := int(given)) < least:
            raise UsageError(f"{option}: must be at least {least}, got {number}")
        return number

    read.__name__ = "int"  # argparse prints this name when it rejects a value
    return read


def add_attempt(parser: argparse._ActionsContainer, which: str) -> None:
    """Add `--attempt N`. `which`: the kind of attempt used by default."""
    help_text = f"number of the attempt (default: the newest {which})"
    parser.add_argument("--attempt", metavar="N", type=whole("--attempt", least=0), help=help_text)


def _login(given: str) -> str:
    from muster.jobs.basics.hostnames import check_user

    return _checked("--login", check_user, given)


def _jump(given: str) -> str:
    from muster.jobs.basics.hostnames import check_jump

    return _checked("--jump", check_jump, given)


def _iface(given: str) -> str:
    from muster.jobs.basics.hostnames import check_network

    return _checked("--iface", check_network, given)


def _restarts(given: str) -> str:
    if given != "default" and not (given.isdecimal() and len(given) < 10):
        raise UsageError(f"--restart: must be a number of restarts, or have no value, got {given!r}")
    return given


def _port(given: str) -> int:
    from muster.jobs.basics.hostnames import MAX_PORT

    if not (given.isdecimal() and 1 <= int(given[:6]) <= MAX_PORT):
        raise UsageError(f"--port: must be a number from 1 to {MAX_PORT}, got {given!r}")
    return int(given)


def _checked(option: str, check: Callable[[str], str], given: str) -> str:
    try:
        return check(given)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from error
