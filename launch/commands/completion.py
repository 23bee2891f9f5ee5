"""`muster completion SHELL`: completion of commands, options and run names in bash, zsh or fish."""

import argparse
from collections.abc import Sequence
from typing import Final

ASK: Final = "muster completion words +"  # the separator is + because argparse would drop --
SCRIPTS: Final = {
    "bash": f"""\
_muster() {{
  local IFS=$'\\n'
  COMPREPLY=($({ASK} "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null))
}}
complete -o default -o bashdefault -F _muster muster
""",
    "zsh": f"""\
#compdef muster
_muster() {{
  local -a found
  found=("${{(@f)$({ASK} "${{(@)words[2,CURRENT]}}" 2>/dev/null)}}")
  if [[ -n "$found" ]]; then compadd -a found; else _files; fi
}}
compdef _muster muster
""",
    "fish": f"""\
complete -c muster -a '({ASK} (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)'
""",
}
EPILOG: Final = """\
source <(muster completion bash)                  in ~/.bashrc
source <(muster completion zsh)                   in ~/.zshrc, after compinit
muster completion fish | source                   in ~/.config/fish/config.fish
"""
RUNS: Final = ("RUN", "RUN|SWEEP", "JOB|RUN")  # metavars of arguments that name a run


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("shell", metavar="SHELL", choices=[*SCRIPTS, "words"], help=", ".join(SCRIPTS))
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS
    )  # the words of a command line; the last word is completed


def run(args: argparse.Namespace) -> int:
    """Print the script or, when called by that script, the completions of a command line's last word.

    Raises:
        UsageError: if words follow the name of the shell.
    """
    from muster.jobs.basics.errors import UsageError

    if args.shell == "words":
        print("\n".join(completions(args.words[1:])))  # without the +
        return 0
    if args.words:
        raise UsageError(f"completion {args.shell}: takes no further words, got {args.words[0]!r}; remove them")
    print(SCRIPTS[args.shell], end="")
    return 0


def completions(words: Sequence[str]) -> list[str]:
    """Return the completions of the last word after `muster`; if there are none, the shell offers files."""
    from muster.launch.cli import PHRASES, command_of

    *before, last = words or [""]
    if not before:
        return [name for name in PHRASES if name.startswith(last)]
    if before[0] not in PHRASES:
        return []
    parser, rest, within, _ = command_of(before)
    if rest and (taking := parser.option_taking(rest[-1])) is not None:
        found = [str(each) for each in taking.choices or ()]
    elif last.startswith("-"):
        found = parser.options()
    else:
        found = [*within] if not rest else []
        for each in parser.positionals:
            found += map(str, each.choices or ())
            found += _runs() if each.metavar in RUNS else []
    return [each for each in found if each.startswith(last)]


def _runs() -> list[str]:
    """Return the names of all runs, newest first."""
    from muster.jobs.basics.errors import MusterError
    from muster.jobs.runfolder.rundir import list_runs, runs_root

    try:
        return [run.run_id for run in reversed(list_runs(runs_root(None)))]
    except MusterError:  # errors would disturb the user while typing
        return []
