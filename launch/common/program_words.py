"""A program on the command line in place of a job file: `muster run -n 4 train.py --lr 3e-4`, `muster run -- prog`.

Muster's options come before the program. All words after the program are its arguments.
"""

# ruff: noqa: PTH110, PTH113, PTH119, PTH122, PTH123
# os.path, because importing pathlib would slow down every command's --help by 2 ms

import argparse
import os
from collections.abc import Sequence
from os.path import basename, exists, isfile, splitext
from typing import Final

from muster.jobs.basics.errors import RefusedError, UsageError

COMMAND_LINE: Final = "command line"  # the name of a job without a file, in messages
STARTED_BY: Final = {".py": "python", ".sh": "bash"}
JOB_FILES: Final = (".yaml", ".yml", ".json")
MAGIC: Final = (b"#!", b"\x7fE")  # the first bytes of scripts and ELF files


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command. If they name a program, set `args.program` and `args.job_text`.

    Raises:
        UsageError: if both a job file and a program are given, or no program follows `--`.
        RefusedError: if the program is not executable.
    """
    if parser.get_default("program") is None:
        return parser.parse_args(arguments)
    ours, program = split(parser, arguments)
    args = parser.parse_args([COMMAND_LINE, *ours] if program else ours)
    if program:
        args.program, args.job_text = tuple(program), job_text(program)
    return args


def split(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into Muster's words and the program with its arguments. Errors as for `parse`.

    An option with an optional value takes the next word only if that is a number, so that a job or program may follow.
    """
    options = {name: action for action in parser._actions for name in action.option_strings}
    ours: list[str] = []
    left, job = list(arguments), ""
    while left:
        word = left.pop(0)
        if word == "--":
            if job or not left:
                found = f"a job is given as well ({job})" if job else "no program follows"
                raise UsageError(f"--: {found}; write muster ... -- PROGRAM ARGUMENTS, or muster ... JOB.yaml")
            return ours, left
        if not word.startswith("-") and not job:
            if is_program(word):
                named = "/" in word or splitext(word)[1] in STARTED_BY
                return ours, [word if named else f"./{word}", *left]
            job = word
            ours.insert(0, job)  # first, because an option with several values would take it as one of them
            continue
        ours.append(word)
        action = options.get(word)
        if action is not None and action.nargs == "?" and not (left and left[0].isdecimal()):
            ours[-1] = f"{word}={action.const}"
        elif action is not None and action.nargs != 0 and left:
            ours.append(left.pop(0))
            while action.nargs == "+" and left and "=" in left[0] and not left[0].startswith("-"):
                ours.append(left.pop(0))
    return ours, []


def is_program(word: str) -> bool:
    """Return whether a word names a program: by a script's suffix, or by the file's first bytes (`MAGIC`).

    Raises:
        RefusedError: if the program is not executable.
        UsageError: if the word names a program on PATH, which has to follow `--`.
    """
    suffix = splitext(word)[1]
    if not suffix and "/" not in word and not exists(word):
        from shutil import which

        if which(word) is not None:
            raise UsageError(f"{word}: no such job file; a program on PATH is started by: muster ... -- {word} ...")
    if suffix in STARTED_BY or suffix in JOB_FILES or not isfile(word):
        return suffix in STARTED_BY
    try:
        with open(word, "rb") as file:
            if file.read(2) not in MAGIC:
                return False
    except PermissionError:  # a program need not be readable; reading an unreadable job file raises an error later
        return os.access(word, os.X_OK)
    if not os.access(word, os.X_OK):
        raise RefusedError(f"{word}: is a program, but not executable; run: chmod +x {word}")
    return True


def job_text(program: Sequence[str]) -> str:
    """Return the text of a job file that runs the program on the command line.

    Raises:
        UsageError: if a word is not UTF-8.
    """
    from muster.jobs.spec import yamlfile
    from muster.jobs.spec.load import as_name

    for word in program:
        # surrogates: Python's representation of bytes that are not UTF-8
        if any("\ud800" <= each <= "\udfff" for each in word):
            raise UsageError(f"{word!r}: is not UTF-8, as job files must be; rename it")
    starter = STARTED_BY.get(splitext(program[0])[1])
    argv = [starter, *program] if starter else list(program)
    return yamlfile.dump({"name": as_name(_title(argv)), "command": argv})


def _title(argv: Sequence[str]) -> str:
    """Return a name for the run of a command: its script, its module, or the program itself."""
    if argv[1:2] == ["-m"] and len(argv) > 2:
        return argv[2]
    script = next((word for word in argv if splitext(word)[1] in STARTED_BY), argv[0])
    return splitext(basename(script))[0]
