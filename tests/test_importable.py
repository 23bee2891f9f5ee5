"""`import muster` in a user's own Python: the folder that a `command:` job finds on PYTHONPATH."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.jobs.basics.boot import CODE_ROOT, importable

# Before anything of Muster's is imported, this Python says that it is older.
OLD = "import sys; sys.version_info = (3, 9, 1); import muster"


def python(code: str, *path: Path | str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that finds packages in the folders of `path` first."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, "-c", code], env=env, cwd="/", capture_output=True, text=True, timeout=30)


def test_the_folder_holds_muster_and_nothing_else() -> None:
    files = {path.relative_to(importable()) for path in Path(importable()).rglob("*") if path.suffix != ".pyc"}
    assert {str(path) for path in files if path.name != "__pycache__"} == {"muster", "muster/__init__.py"}


def test_its_subpackages_are_ours_and_a_users_own_stay_theirs(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text("")
    code = "import jobs, muster.jobs.basics.exits as exits; print(jobs.__file__); print(exits.__file__)"
    done = python(code, importable(), tmp_path)
    assert done.stdout.splitlines() == [str(tmp_path / "jobs.py"), f"{CODE_ROOT}/muster/jobs/basics/exits.py"]


@pytest.mark.parametrize("folder", [importable(), CODE_ROOT], ids=["importable", "package"])
def test_public_names_are_imported_when_they_are_used(folder: Path | str) -> None:
    code = "import muster; muster.nothing"
    done = python(code, folder)
    assert done.stderr.splitlines()[-1] == "AttributeError: module 'muster' has no attribute 'nothing'"
    code = "from muster import public; public.NAMES['CODE_ROOT'] = 'muster.jobs.basics.boot'; import muster, sys\n"
    done = python(f"{code}print('muster.jobs' in sys.modules, muster.CODE_ROOT)", folder)
    assert done.stdout == f"False {CODE_ROOT}\n", done.stderr


def test_an_old_python_is_told_so_in_one_sentence() -> None:
    done = python(OLD, importable())
    last = done.stderr.splitlines()[-1]
    assert last == (
        f"ImportError: muster needs Python 3.10 or newer, and {sys.executable} is Python 3.9.1; name another with "
        "python: in the job or site file"
    )
    for path in (Path(importable(), "muster/__init__.py"), CODE_ROOT / "muster/public.py"):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 6))
