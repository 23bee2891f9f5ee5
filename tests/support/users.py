"""Other users of this machine: commands and functions that run under their user ids. Needs root."""

import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VICTIM, ATTACKER = 12345, 12346
RUN_S = 60.0

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users of this machine")


def command(uid: int, *argv: str, gid: int | None = None, caps: str = "") -> list[str]:
    """Return a command that runs another one under a user id, without any other group."""
    more = [f"--inh-caps={caps}", f"--ambient-caps={caps}"] if caps else []
    return ["setpriv", f"--reuid={uid}", f"--regid={uid if gid is None else gid}", "--clear-groups", *more, *argv]


@cache
def reading_caps(uid: int) -> str:
    """Return the capability without which a user cannot reach this interpreter, as in root's home; mostly none."""
    again = "import subprocess, sys, launch.cli; subprocess.run([sys.executable, '-c', ''], check=True)"
    for caps in ("", "+dac_read_search"):
        argv = command(uid, sys.executable, "-c", again, caps=caps)  # setpriv itself may reach what the user may not
        if subprocess.run(argv, capture_output=True, cwd=ROOT, check=False).returncode == 0:
            return caps
    pytest.skip(f"user {uid} cannot start {sys.executable}")


def muster_as(
    uid: int, *arguments: str, cwd: Path, gid: int | None = None, umask: int = 0o022, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `muster ...` as another user; its home is `cwd`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MUSTER", "XDG"))}
    return subprocess.run(
        command(uid, sys.executable, "-m", "muster", *arguments, gid=gid, caps=reading_caps(uid) if uid else ""),
        env={**kept, "HOME": str(cwd), "PYTHONPATH": str(ROOT), "TMPDIR": "/tmp", **environment},
        cwd=cwd,
        umask=umask,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )


def succeeds_as(uid: int, work: Callable[[], object], *, gid: int | None = None) -> bool:
    """Run a function in a fork under a user id; return whether it raised no PermissionError. Others fail the test."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            os.setgroups([])
            os.setgid(uid if gid is None else gid)
            os.setuid(uid)
            work()
            code = 0
        except PermissionError:
            code = 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1), "it failed for another reason; see above"
    return code == 0


def give(path: Path, uid: int) -> None:
    """Make a user the owner of a folder and all that is in it, which everybody may read."""
    for each in (path, *path.rglob("*")):
        os.lchown(each, uid, uid)
        if not each.is_symlink():
            each.chmod(0o755 if each.is_dir() else 0o644)


@contextmanager
def public_folder(mode: int = 0o1777) -> Iterator[Path]:
    """Make a folder that all users may enter, which those of pytest are not, and write in: as /tmp."""
    folder = Path(tempfile.mkdtemp(prefix="muster-users-", dir="/tmp"))
    folder.chmod(mode)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


AS_ATTACKER = command(ATTACKER, "--")
