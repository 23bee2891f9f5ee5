"""The `muster` command, with a table of subcommands. Each is a module with `configure(parser)` and `run(args)`.

Only the chosen subcommand is imported, so `muster --help` costs little more than starting Python. Errors of
`jobs/basics/errors.py` are printed only here, as one line on standard error, and set the exit code.
"""

import errno
import io
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext

TYPE_CHECKING = False  # importing typing would cost every start 3 ms
if TYPE_CHECKING:
    from typing import Any

    from muster.launch.common.parser import Parser

#        group, (name, phrase) ...
GROUPS = (
    (
        "start",
        (
            ("run", "start the ranks of a job, watch them and report the outcome"),
            ("submit", "start a run and return: it runs in the background or in Slurm's queue"),
            ("resume", "continue a finished run from its newest good checkpoint"),
            ("sweep", "run every point of a grid of settings and compare the results"),
            ("plan", "preview a run: hosts, ranks, environment, commands"),
            ("cmd", "print the line to paste on each node to start a run by hand"),
            ("save", "make a run save a checkpoint now and continue"),
            ("stop", "end a run and any processes that it left behind"),
            ("rm", "remove the folders of runs or sweeps that are over"),
            ("prune", "remove old runs of a folder, by age, number and state"),
        ),
    ),
    (
        "look",
        (
            ("list", "list the runs of a folder"),
            ("status", "show the progress of one run and the state of every rank"),
            ("watch", "show a run in progress: step, rate, next checkpoint, and every node and rank"),
            ("compare", "compare the step times of several runs, part by part, and show which run is faster"),
            ("plot", "draw a plot of several runs, or print its numbers"),
            ("report", "write one self-contained HTML page: comparison, plots, attempts, memory, profiles"),
            ("logs", "print or follow the output of the ranks, each line with its rank"),
            ("profile", "show the profiles of ranks: times, overlap, operators, and where the traces are"),
            ("timeline", "draw the activity of every rank in a step: computing, communicating, waiting"),
            ("memory", "predict a rank's memory in every mode, or show the memory that a run's ranks used"),
            ("why", "show the first failure of a run, its last lines, and what to do next"),
            ("checkpoint", "list, verify, show or export the checkpoints of a run"),
        ),
    ),
    (
        "data and verification",
        (
            ("data", "fetch, check and prepare a data set on this machine"),
            ("verify", "check that a parallel run computes the same result as one process"),
        ),
    ),
    (
        "measure",
        (
            ("bench", "measure collectives, or models alone; show, compare, plot and fit the results"),
            ("advise", "predict the step of every way to split a job, and choose the best"),
            ("predict", "predict times, the best bucket and a job's steps from measurements"),
            ("schedule", "draw a pipeline's step: which rank computes what and when, and how long ranks are idle"),
        ),
    ),
    (
        "cluster",
        (
            ("check", "test every node before a run: ssh, versions, code, network, clock, storage"),
            ("hosts", "expand and fold lists of hosts, convert a manifest"),
            ("sync", "copy this code to nodes that do not share a file system"),
            ("box", "make a small real cluster inside this machine, and inject failures"),
            ("cloudlab", "write the profile of a CloudLab experiment"),
        ),
    ),
    (
        "about",
        (
            ("schema", "print the JSON Schema of the job file"),
            ("completion", "print a script that completes commands and options in bash, zsh or fish"),
            ("env", "show the rank variables found here, and which launcher set them"),
        ),
    ),
)
PHRASES = {name: phrase for _, commands in GROUPS for name, phrase in commands}
LOOKING = (
    "list",
    "status",
    "watch",
    "compare",
    "plot",
    "report",
    "logs",
    "profile",
    "timeline",
    "memory",
    "why",
)  # these commands only read the files of runs
INTERRUPTED = 130  # 128 + SIGINT
BROKEN_PIPE = 141  # 128 + SIGPIPE
NOT_FOUND = 72
STORAGE = 74
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code (see the table in `jobs/basics/exits.py`)."""
    _open_standard_streams()
    try:
        os.getcwd()  # noqa: PTH109 (importing pathlib costs 8 ms, which --help avoids)
    except FileNotFoundError:
        print("muster: the current folder no longer exists; cd to another", file=sys.stderr)
        return NOT_FOUND
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:2] == ["help", "hosts"]:
        print(_help_of_hosts())
        return 0
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()  # flush here, where a closed pipe can still be handled
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        _forget_stdout()
        print(f"muster: standard output: {error.strerror}; free some space, or send it elsewhere", file=sys.stderr)
        return STORAGE


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"muster {version()}")
        return 0
    name = arguments[0]
    if name not in PHRASES:
        return _unknown(name)
    return _run(name, arguments[1:])


def command_of(words: Sequence[str]) -> "tuple[Parser, list[str], Collection[str], Callable[[Any], int]]":
    """Return the parser of a command, its remaining words, its subcommands, and the function that runs it."""
    from importlib import import_module

    from muster.launch.common.parser import Parser

    name, *rest = words
    command, phrase = import_module(f"muster.launch.commands.{name}"), PHRASES[name]
    within = getattr(command, "WITHIN", {})
    if rest and rest[0] in within:
        module, phrase = within[rest[0]]
        command, name, rest, within = import_module(module), f"{name} {rest[0]}", rest[1:], {}
    parser = Parser(prog=f"muster {name}", description=f"{phrase}.")
    command.configure(parser)
    return parser, rest, within, command.run


def _run(name: str, arguments: list[str]) -> int:
    from muster.jobs.basics import terminal
    from muster.jobs.basics.errors import MusterError
    from muster.launch.common.program_words import parse

    parser, arguments, _, run = command_of([name, *arguments])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # ranks may print characters that the terminal's encoding lacks
    terminal.guard()  # from here on the output may contain text of ranks, files and other machines
    try:
        with _looking() if name in LOOKING else nullcontext():
            return int(run(parse(parser, arguments)))
    except SystemExit as stop:  # argparse: 0 after --help, 2 after a wrong option
        return stop.code if isinstance(stop.code, int) else 1
    except MusterError as error:
        print(f"muster: {error}", file=sys.stderr)
        return error.exit_code


@contextmanager
def _looking() -> Iterator[None]:
    """Allow a command that only reads runs to open colleagues' runs, if colleagues and this user share runs."""
    from muster.jobs.basics.ownership import looking
    from muster.launch.common.limits import collecting_rarely

    def shares() -> bool:
        from muster.jobs.spec.site import load_site

        return load_site(None).share is not None

    with looking(shares), collecting_rarely():
        yield


def _help() -> str:
    width = max(map(len, PHRASES))
    lines = ["muster COMMAND ...: run one job file on a laptop or a cluster, watch it, and find out why it failed.", ""]
    for group, commands in GROUPS:
        lines.append(f"{group}:")
        lines += [f"  {name:{width}}  {phrase}" for name, phrase in commands]
        lines.append("")
    lines.append("muster COMMAND --help shows its options and examples; muster help hosts shows the options for hosts.")
    return "\n".join(lines)


def _help_of_hosts() -> str:
    """Return the help on the options for hosts and network, which many commands share."""
    from muster.launch.common.options import add_hosts, add_network
    from muster.launch.common.parser import Parser

    parser = Parser(prog="muster COMMAND", description="Name the hosts of a job, and its network.", shows_shared=True)
    add_hosts(parser)
    add_network(parser)
    parser.epilog = (
        "muster run job.yaml -H hosts.txt -e node7    all hosts of a file but one\n"
        "muster run job.yaml -w 'n[01-16,20]'         hosts by name\n\n"
        "The command muster hosts expands and converts such lists. More: docs/clusters.md"
    )
    return parser.format_help()


def version() -> str:
    """Return Muster's version."""
    from importlib import metadata

    try:
        return metadata.version("muster")
    except metadata.PackageNotFoundError:
        return "(not installed: running from its source folder)"


def _unknown(name: str) -> int:
    from muster.jobs.basics.words import nearest

    what, known = "command", {**{each: each for each in PHRASES}, "version": "--version"}
    if name.startswith("-"):
        what, known = "option", {each: each for each in ("--help", "--version")}
    near = nearest(name, known)
    hint = f"did you mean {known[near]!r}?" if near else "muster --help lists them"
    print(f"muster: unknown {what} {name!r}; {hint}", file=sys.stderr)
    return 2


def _open_standard_streams() -> None:
    """Open /dev/null for each closed standard stream, so that no socket gets its descriptor number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(descriptor, True)
            if descriptor == 1:
                sys.stdout = os.fdopen(1, "w")
            if descriptor == 2:
                sys.stderr = os.fdopen(2, "w")


def _forget_stdout() -> None:
    """Redirect standard output to /dev/null, so that Python's own flush at exit reports no error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
