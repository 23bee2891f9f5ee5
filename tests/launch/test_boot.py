"""The first file of every process of ours: the code beside it runs, and nothing else's."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from muster.jobs.basics.boot import CODE_ROOT, module_argv

pytestmark = pytest.mark.command

SHOW = "import json, sys\nprint(json.dumps([__name__, __file__, __package__, __spec__.name, sys.argv, sys.path]))\n"
LOADED = "import sys\nprint(*sys.modules)\n"


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """Another code root, with modules that say how they were started."""
    root = tmp_path / "co de"
    for package in ("", "launch", "tool", "tool/inner"):
        (root / "muster" / package).mkdir(parents=True)
        (root / "muster" / package / "__init__.py").touch()
    shutil.copy(CODE_ROOT / "launch" / "boot.py", root / "muster" / "launch")
    (root / "muster" / "tool" / "show.py").write_text(SHOW)
    (root / "muster" / "tool" / "inner" / "__main__.py").write_text(SHOW)
    (root / "muster" / "tool" / "lacks.py").write_text("import no_such_module\n")
    return root


def boot(root: Path, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    argv = [*module_argv(sys.executable, words[0], str(root)), *words[1:]]
    return subprocess.run(argv, capture_output=True, text=True, **options)  # type: ignore[call-overload, no-any-return]


def test_a_module_runs_as_main_from_the_root_that_boot_lies_in(code: Path, tmp_path: Path) -> None:
    words = ["--a", "b c", "$HOME;", ""]
    name, file, package, spec, argv, path = json.loads(boot(code, "muster.tool.show", *words).stdout)
    assert (name, package, spec) == ("__main__", "muster.tool", "muster.tool.show")
    assert file == str(code / "muster" / "tool" / "show.py")
    assert argv == [file, *words]
    assert [folder for folder in path if Path(folder).is_relative_to(code)] == []


def test_a_package_runs_its_main_module(code: Path) -> None:
    name, file, package, spec, _, _ = json.loads(boot(code, "muster.tool.inner").stdout)
    assert (name, package, spec) == ("__main__", "muster.tool.inner", "muster.tool.inner.__main__")
    assert file.endswith("tool/inner/__main__.py")


def test_the_users_own_packages_of_our_names_stay_out(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "__init__.py").write_text("raise SystemExit('the wrong jobs')")
    done = boot(CODE_ROOT, "muster.launch.cli", "--help", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("module", ["muster.tool.none", "muster.none.show", "none.show", "none"])
def test_code_that_is_not_there_is_named_with_what_to_do(code: Path, module: str) -> None:
    done = boot(code, module)
    assert done.returncode == 78
    assert f"there is no {module} in {code}/muster; run muster sync" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_library_that_is_missing_is_python_s_own_message(code: Path) -> None:
    done = boot(code, "muster.tool.lacks")
    assert done.returncode == 1
    assert "No module named 'no_such_module'" in done.stderr


def test_without_a_module_it_says_who_it_is_for(code: Path) -> None:
    argv = module_argv(sys.executable, "", str(code))[:-1]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 78
    assert "users run muster" in done.stderr


def test_it_imports_nothing_that_a_bare_python_has_not(code: Path) -> None:
    (code / "muster" / "tool" / "bare.py").write_text(LOADED)
    bare = subprocess.run([sys.executable, "-I", "-c", LOADED], capture_output=True, text=True)
    assert set(boot(code, "muster.tool.bare").stdout.split()) - set(bare.stdout.split()) == {"muster", "muster.tool"}


def test_an_old_python_is_told_before_it_meets_newer_syntax(code: Path) -> None:
    """The file itself must be readable by the oldest Python that a cluster may have as python3."""
    source = (CODE_ROOT / "launch" / "boot.py").read_text()
    ast.parse(source, feature_version=(3, 6))
    old = source.replace("sys.version_info < OLDEST", "(3, 8, 1) < OLDEST")
    (code / "muster" / "launch" / "boot.py").write_text(old)
    done = boot(code, "muster.tool.show")
    assert done.returncode == 78
    assert "Muster needs 3.10 or newer; set interpreter in the site file" in done.stderr
