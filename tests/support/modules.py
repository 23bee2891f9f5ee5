"""`python -m MODULE` in forks of the rank server: torch is imported there, which is most of what such a start takes."""

import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from muster.jobs.machine import linux
from muster.jobs.world.world import World

Ended = tuple[str, str, int]  # standard output, standard error, exit code


def run_module(
    on_ranks: Callable[..., list[Any]],
    module: str,
    argvs: Sequence[Sequence[str]],
    environ: Mapping[str, str],
    folder: Path,
) -> list[Ended]:
    """Run a module once for each argument list, all at once; return how each ended. Nothing is left of them."""
    folder.mkdir(exist_ok=True)
    argvs = [list(argv) for argv in argvs]
    arguments = {"module": module, "argvs": argvs, "environ": dict(environ), "folder": str(folder)}
    return [(out, err, code) for out, err, code in on_ranks(len(argvs), one_of_them, group=False, **arguments)]


def one_of_them(world: World, module: str, argvs: list[list[str]], environ: dict[str, str], folder: str) -> list[Any]:
    """Run the module in a fork of this rank, which may end as it likes; return what it wrote, and its exit code."""
    out, err = (Path(folder) / f"{world.rank}.{stream}" for stream in ("out", "err"))
    pid = os.fork()
    if pid == 0:
        become(module, argvs[world.rank], environ, out, err)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [out.read_text(), err.read_text(), code]


def become(module: str, argv: list[str], environ: dict[str, str], out: Path, err: Path) -> NoReturn:
    """Be as near as a fork comes to an interpreter that has just been started."""
    linux.die_with_parent(os.getppid())
    code: Any = 0
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdin = open(os.devnull)  # noqa: SIM115, PTH123 - for as long as it lives
    warnings.resetwarnings()
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [module, *argv]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
