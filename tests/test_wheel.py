"""`pip install .` of a clone: one name, a working command, and nothing left behind in the clone."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.command, pytest.mark.slow]

REPOSITORY = Path(__file__).resolve().parents[1]


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of the working tree, with what is not committed yet."""
    folder = tmp_path / "clone"
    for name in git(REPOSITORY, "ls-files", "-co", "--exclude-standard").splitlines():
        if not name.startswith(("tests/", "benchmarks/")) and (REPOSITORY / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name, follow_symlinks=False)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    return folder


def test_a_clone_installs_as_the_one_package_muster(clone: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheels = tmp_path / "wheels"
    built = [*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(wheels), str(clone)]
    subprocess.run(built, check=True)
    (wheel,) = wheels.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in names} == {"muster", f"{wheel.name.rsplit('-', 3)[0]}.dist-info"}
    assert {"muster/jobs/examples/vgg11.yaml", "muster/jobs/train/data/digits/digits.u8", "muster/py.typed"} <= names
    assert {f"muster/launch/look/report/{name}" for name in ("page.html.j2", "style.css", "page.js")} <= names
    assert "muster/importable/muster/__init__.py" in names
    left = [
        line for line in git(clone, "status", "--porcelain", "--ignored").splitlines() if not line.startswith("A  ")
    ]
    assert left == []

    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(fresh)], check=True)
    python = fresh / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True)
    asked = [python, "-I", "-c", "import muster; print(muster.__file__)"]
    package = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()).parent
    assert package.is_relative_to(fresh)
    libraries = sorted(Path(sysconfig.get_path("purelib")).iterdir())
    for library in libraries:  # links: a .pth file would bring our own checkout's muster along
        if not library.name.startswith("muster") and not (package.parent / library.name).exists():
            (package.parent / library.name).symlink_to(library)
    job = package / "jobs" / "examples" / "command.yaml"
    words = ["run", str(job), "--runs", str(tmp_path / "runs")]
    done = subprocess.run([fresh / "bin" / "muster", "plan", str(job)], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{package}/launch/boot.py" in done.stdout
    done = subprocess.run([fresh / "bin" / "muster", *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    script = tmp_path / "own.py"
    script.write_text("import sys, muster.jobs.basics.exits; print(sys.prefix, muster.__file__)\n")
    done = subprocess.run([fresh / "bin" / "muster", "run", script.name], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == [str(fresh), f"{package}/importable/muster/__init__.py"], done.stderr
