"""Turn a forked child into a rank: set its group, files, cores and environment, then run a function or a program.

A RankStart is a mapping of plain values, built in `launch/agent.py`:

    rank      int
    env       {name: value}, added to the environment that the rank inherits
    unset     [name, ...], removed from the inherited environment; optional
    workdir   folder to run in
    out, err  files to append standard output and standard error to
    cores     [core, ...] to be pinned to; empty: not pinned
    threads   number of threads for libraries
    argv      program and arguments (a `command:` job), or
    call      "module:function" of Muster, called with `payload`
    adopt     the number of a rank of the last attempt, which continues as this rank; optional
"""

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

from muster.jobs.basics import exits
from muster.jobs.basics.files import open_log
from muster.jobs.hosts import ranks
from muster.jobs.node.reports import Reporter

NOT_EXECUTABLE: Final = 126
NOT_FOUND: Final = 127


def become(start: Mapping[str, Any], reports: int, page: int) -> NoReturn:
    """Turn this fresh child into the rank that `start` describes.

    `reports` is the write end of the report pipe. `page` is the descriptor of the page, which a program inherits.
    """
    code = 1
    try:
        os.setpgid(0, 0)
        _redirect(start["out"], start["err"])
        for name in start.get("unset", ()):
            os.environ.pop(name, None)
        os.environ.update(start["env"])
        if start["cores"]:
            os.sched_setaffinity(0, start["cores"])
        os.chdir(start["workdir"])
    except (OSError, ValueError) as error:  # ValueError: a variable with NUL or "=" in it
        _say(f"rank {start['rank']} cannot start: {error}", error, reports)
        _flush_and_exit(exits.REFUSED)
    try:
        if start.get("argv"):
            _execute(start["argv"], reports, page)
        os.environ[ranks.STATUS_FD] = ranks.descriptor_text(reports)
        code = _call(start)
    except SystemExit as end:
        code, text = exits.of_system_exit(end.code)
        if text:
            with suppress(OSError):  # the disk is full
                print(text, file=sys.stderr)
    except BaseException as error:
        # Catch everything, because a forked child must not return into its parent's code.
        traceback.print_exc()
        _reporter(reports).failed(error, peer=False)
    finally:
        _flush_and_exit(code)


def become_another(start: Mapping[str, Any]) -> None:
    """Continue in this process as the rank that `start` describes, of the next attempt."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the disk is full
            stream.flush()
    _redirect(start["out"], start["err"])
    os.environ.update(start["env"])
    if start["cores"]:
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # a thread may have ended
                os.sched_setaffinity(int(thread.name), start["cores"])
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(start["threads"])


def _call(start: Mapping[str, Any]) -> int:
    module, _, function = start["call"].partition(":")
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(start["threads"])
    result: int = getattr(importlib.import_module(module), function)(start["payload"])
    return result


def _execute(argv: list[str], reports: int, page: int) -> NoReturn:
    for name, descriptor in ((ranks.STATUS_FD, reports), (ranks.PAGE, page)):
        os.environ[name] = ranks.descriptor_text(descriptor)
        os.set_inheritable(descriptor, True)
    for number in (
        signal.SIGPIPE,
        signal.SIGXFSZ,
        signal.SIGUSR1,
    ):  # Python ignores these signals, and exec would pass that on
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, os.environ)
    except FileNotFoundError as error:
        hint = "write the command as a list of words" if " " in argv[0] else "give its full path, or set PATH under env"
        if argv[0].startswith("/") and " " not in argv[0]:
            hint = "this node has no such file; correct the path, or set python in the job or site file"
        _say(f"command not found: {argv[0]!r}; {hint}", error, reports)
        _flush_and_exit(NOT_FOUND)
    except OSError as error:
        _say(f"cannot run {argv[0]!r}: {error.strerror}", error, reports)
        _flush_and_exit(NOT_EXECUTABLE)


def _say(message: str, error: OSError | ValueError, reports: int) -> None:
    print(f"muster: {message}", file=sys.stderr)
    failure = type(error)(message) if isinstance(error, OSError) else ValueError(message)
    _reporter(reports).failed(failure, peer=False)


def _reporter(reports: int) -> Reporter:
    return Reporter({ranks.STATUS_FD: ranks.descriptor_text(reports)})


def _redirect(out: str, err: str) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for path, descriptor in ((out, 1), (err, 2)):
        opened = open_log(Path(path))
        os.dup2(opened, descriptor)
        os.close(opened)
    os.close(null)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _flush_and_exit(code: int) -> NoReturn:
    """Exit without the interpreter's cleanup, where a broken process group may abort and change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the disk is full: only the exit code can report that
            code = code or exits.STORAGE
    os._exit(code)
