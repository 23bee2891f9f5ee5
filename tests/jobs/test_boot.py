"""Where our code is, and the argv that starts a process of ours from it, whatever the user has lying about."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.jobs.basics.boot import CODE_ROOT, module_argv

pytestmark = pytest.mark.command

REPOSITORY = Path(__file__).resolve().parents[2]
BOOT = REPOSITORY / "launch" / "boot.py"
TELL = """
import json, sys
from muster.jobs.basics import exits
print(json.dumps({"name": __name__, "file": __file__, "jobs": exits.__file__, "argv": sys.argv[1:]}))
"""


def run(argv: list[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        cwd=cwd,
        env={**os.environ, **variables},
        input="",
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.fixture
def shadows(tmp_path: Path) -> Path:
    """A user's folder with packages of our names, and a module of the standard library's, none of which can be used."""
    folder = tmp_path / "user"
    for name in ("muster", "jobs", "launch", "asyncio"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise SystemExit('the user code was imported')\n")
    (folder / "sitecustomize.py").write_text("raise SystemExit('the user code was imported')\n")
    return folder


@pytest.fixture
def make_root(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that makes a code root: boot.py, jobs/basics/exits.py, and the given files."""

    def make(name: str = "snapshot", **files: str) -> Path:
        root = tmp_path / name
        for package in ("muster", "muster/jobs", "muster/jobs/basics", "muster/launch"):
            (root / package).mkdir(parents=True)
            (root / package / "__init__.py").touch()
        shutil.copy(BOOT, root / "muster" / "launch" / "boot.py")
        (root / "muster" / "jobs" / "basics" / "exits.py").write_text("HERE = True\n")
        for module, text in files.items():
            path = root / "muster" / f"{module.replace('__in__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return root

    return make


def test_the_code_root_is_the_folder_that_holds_our_packages() -> None:
    assert CODE_ROOT.resolve() == REPOSITORY


def test_the_argv_is_isolated_and_absolute() -> None:
    assert module_argv("/opt/python", "muster.jobs.node.warm", "/srv/code") == [
        "/opt/python",
        "-I",
        "/srv/code/muster/launch/boot.py",
        "muster.jobs.node.warm",
    ]
    assert module_argv("/opt/python", "muster.jobs.node.warm")[2] == f"{CODE_ROOT}/muster/launch/boot.py"
    assert CODE_ROOT.is_absolute()


def test_the_argv_works_from_any_folder(tmp_path: Path) -> None:
    done = run([*module_argv(sys.executable, "muster.launch.cli"), "--version"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("muster ")


@pytest.mark.parametrize("through", ["cwd", "PYTHONPATH", "HOME"])
def test_a_users_own_jobs_folder_does_not_shadow_ours(shadows: Path, tmp_path: Path, through: str) -> None:
    variables = {} if through == "cwd" else {through: str(shadows)}
    cwd = shadows if through == "cwd" else tmp_path
    done = run([*module_argv(sys.executable, "muster.launch.agent"), "--node", "7"], cwd, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout.splitlines()[0])["message"] == "Hello"


def test_a_snapshots_code_is_used_rather_than_the_installed_one(make_root: Callable[..., Path], shadows: Path) -> None:
    root = make_root(launch__in__tell=TELL)
    done = run(
        [*module_argv(sys.executable, "muster.launch.tell", str(root)), "a b", ""], shadows, PYTHONPATH=str(REPOSITORY)
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "name": "__main__",
        "file": str(root / "muster" / "launch" / "tell.py"),
        "jobs": str(root / "muster" / "jobs" / "basics" / "exits.py"),
        "argv": ["a b", ""],
    }


def test_a_root_behind_a_link_is_the_one_that_was_named(make_root: Callable[..., Path], tmp_path: Path) -> None:
    """Nodes share the name, and perhaps not what lies behind it."""
    link = tmp_path / "current"
    link.symlink_to(make_root(launch__in__tell=TELL))
    done = run(module_argv(sys.executable, "muster.launch.tell", str(link)), tmp_path)
    assert json.loads(done.stdout)["jobs"] == str(link / "muster" / "jobs" / "basics" / "exits.py")


@pytest.mark.parametrize("name", ["it's a root", "ünïcode", "tab\tand\nnewline", "$(echo no)"])
def test_a_root_may_have_any_name(make_root: Callable[..., Path], tmp_path: Path, name: str) -> None:
    root = make_root(name, launch__in__tell=TELL)
    done = run(module_argv(sys.executable, "muster.launch.tell", str(root)), tmp_path)
    assert json.loads(done.stdout)["file"] == str(root / "muster" / "launch" / "tell.py")


def test_what_it_runs_ends_with_its_own_code_and_traceback(make_root: Callable[..., Path], tmp_path: Path) -> None:
    root = make_root(
        launch__in__ends="import sys; sys.exit(9)\n", launch__in__fails="import muster.jobs.no_such_module\n"
    )
    assert run(module_argv(sys.executable, "muster.launch.ends", str(root)), tmp_path).returncode == 9
    done = run(module_argv(sys.executable, "muster.launch.fails", str(root)), tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'muster.jobs.no_such_module'"
    assert str(root / "muster" / "launch" / "fails.py") in done.stderr


def test_classes_of_what_it_runs_belong_to_main(make_root: Callable[..., Path], tmp_path: Path) -> None:
    """Worker processes of a rank find them there when they are unpickled."""
    text = "import pickle\nclass Sample: pass\nprint(type(pickle.loads(pickle.dumps(Sample()))).__module__)\n"
    done = run(module_argv(sys.executable, "muster.launch.pickles", str(make_root(launch__in__pickles=text))), tmp_path)
    assert (done.stdout, done.stderr) == ("__main__\n", "")
