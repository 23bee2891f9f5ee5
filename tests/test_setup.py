"""setup.sh in a copy of the repository: real virtual environments, the real package index, and every way to fail.

A whole installation takes 10 s and more: three are enough for all of this, and two of them are made at once.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from muster.jobs.basics import exits
from support.package_index import PackageIndex, serving, sha256, wheel
from support.soak import only_some
from support.users import AS_ATTACKER, needs_root, public_folder

pytestmark = [pytest.mark.command, pytest.mark.timeout(300), pytest.mark.slow]
REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = sorted(init.parent.name for init in REPOSITORY.glob("*/__init__.py"))
OLD = ("", ".10", ".11", ".12", ".13", ".14")  # the names that setup.sh looks for, behind python3
Ended = subprocess.CompletedProcess[str]

# Whoever runs the tests as root may write everywhere: without these two rights root is bound by permissions, too.
BOUND = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []

NO_NETWORK = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_FIND_LINKS": "",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",  # the discard port: refused at once
    "no_proxy": "*",
}


@dataclass(frozen=True)
class Made:
    """What three calls at once made and said: two in one folder, and one that takes torch from a module."""

    folder: Path
    said: tuple[str, str]
    module: Path  # the virtual environment that stands for a cluster's module
    beside_module: Path
    said_of_module: str


def copy_to(folder: Path, packages: Sequence[str] = PACKAGES) -> Path:
    """Copy what setup.sh reads into a folder."""
    folder.mkdir(parents=True)
    for name in ("setup.sh", "pyproject.toml"):
        shutil.copy2(REPOSITORY / name, folder / name)
    for name in ("requirements", *packages):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "muster").mkdir(exist_ok=True)
    return folder


def setup(folder: Path, *options: str, before: list[str] | None = None, environ: dict[str, str] | None = None) -> Ended:
    """Run setup.sh, from another folder than its own."""
    return subprocess.run(
        [*(before or []), str(folder / "setup.sh"), *options],
        cwd="/",
        env={**os.environ, **(environ or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def script(path: Path, text: str) -> Path:
    """Write an executable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def error_of(ended: Ended, code: int) -> str:
    """Return the one line that a failed setup.sh says."""
    assert ended.returncode == code, ended.stdout + ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("setup.sh: ")
    return line


def installing(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that installs anew: .ci/run does that twice itself, so these are for who changes setup.sh."""
    return pytest.mark.cluster(pytest.mark.soak(test))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Call setup.sh twice at once in a folder with a space in its name, and beside that for a module's torch."""
    folder = copy_to(tmp_path_factory.mktemp("setup") / "a copy")
    beside = copy_to(tmp_path_factory.mktemp("setup") / "copy")
    module = module_with_torch(beside.with_name("module"))
    launcher = [folder / "setup.sh", "--launcher-only"]
    with_torch = [beside / "setup.sh", "--system-site-packages", "--python", module / "bin/python"]
    calls = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in (launcher, launcher, with_torch)
    ]
    try:
        ended = [(each.communicate(timeout=250)[0], each.returncode) for each in calls]
    finally:
        for each in calls:
            each.kill()
    assert [code for _, code in ended] == [0, 0, 0], ended
    (first, _), (second, _), (third, _) = ended
    return Made(folder, (first, second), module, beside, third)


def module_with_torch(folder: Path) -> Path:
    """Make a virtual environment whose torch and numpy are empty packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = packages_of(folder)
    script(packages / "torch/__init__.py", "__version__ = '2.11.0+cu130'")
    script(packages / "numpy/__init__.py", "")
    return folder


def packages_of(environment: Path) -> Path:
    (found,) = environment.glob("lib/python3*/site-packages")
    return found


@pytest.fixture
def installed(made: Made) -> Path:
    """The copy that `setup.sh --launcher-only` has been run in."""
    return made.folder


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A fresh copy, without packages."""
    return copy_to(tmp_path / "copy", packages=())


@installing
def test_a_second_call_does_nothing_within_5_s(installed: Path) -> None:
    def trees() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (installed / ".venv").rglob("*") if path.suffix != ".pyc"}

    def took_s() -> float:
        started = time.monotonic()
        calls.append(setup(installed, "--launcher-only"))
        return time.monotonic() - started

    calls: list[Ended] = []
    before = trees()
    assert any(took_s() < 5 for _ in range(3))  # the machine may be busy with something else
    ended = calls[0]
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "nothing to do" in ended.stdout
    assert trees() == before


@installing
def test_launcher_only_gives_a_muster_that_plans_without_torch(installed: Path, tmp_path: Path) -> None:
    muster = installed / ".venv/bin/muster"
    job = REPOSITORY / "jobs/examples/hello.yaml"
    shown = subprocess.run([muster, "plan", job], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=50)
    assert "4 ranks" in shown.stdout
    torch = subprocess.run([installed / ".venv/bin/python", "-c", "import torch"], capture_output=True, check=False)
    assert b"No module named 'torch'" in torch.stderr


@installing
def test_what_one_call_added_the_next_keeps(installed: Path) -> None:
    pip = installed / ".venv/setup.log"
    added = setup(installed, "--dev", "--launcher-only")
    assert added.returncode == 0, added.stdout + added.stderr
    assert "installing the launcher" not in added.stdout
    log = pip.read_text()
    kept = setup(installed, "--launcher-only")
    assert (kept.returncode, pip.read_text()) == (0, log)
    assert "test tools" in kept.stdout
    assert (installed / ".venv/bin/pytest").exists()


def test_without_a_network_it_says_so(ready: Path) -> None:
    require(ready, core=pin("leaf", "1.0", sha256(b"")))
    begun = setup(ready, "--launcher-only", environ=NO_NETWORK)
    assert "no network, or the package index does not answer" in error_of(begun, exits.UNREACHABLE)


@installing
def test_a_moved_venv_is_begun_anew_and_a_call_without_network_is_gone_on_with(installed: Path, tmp_path: Path) -> None:
    # All that setup.sh looks at; it says where it was made.
    copy = copy_to(tmp_path / "copy")
    (copy / ".venv").mkdir()
    shutil.copy2(installed / ".venv/setup.state", copy / ".venv/setup.state")
    shutil.copytree(installed / ".venv/bin", copy / ".venv/bin", symlinks=True)
    begun = setup(copy, "--launcher-only", environ=NO_NETWORK)
    assert "no network, or the package index does not answer" in error_of(begun, exits.UNREACHABLE)
    assert "making .venv" in begun.stdout
    later = setup(copy, "--launcher-only")
    assert later.returncode == 0, later.stdout + later.stderr
    assert "making .venv" not in later.stdout
    subprocess.run([copy / ".venv/bin/muster", "--version"], check=True, capture_output=True)


def test_someone_elses_venv_is_left_alone(copy: Path) -> None:
    (copy / ".venv").mkdir()
    (copy / ".venv/theirs").touch()
    assert "was not made by setup.sh" in error_of(setup(copy), exits.REFUSED)
    assert [path.name for path in (copy / ".venv").iterdir()] == ["theirs"]


@installing
def test_torch_of_a_module_is_used_when_new_enough(made: Made) -> None:
    assert f"using torch 2.11.0+cu130 of {made.module}/bin/python" in made.said_of_module
    shown = subprocess.run(
        [made.beside_module / ".venv/bin/python", "-I", "-c", "import torch; print(torch.__file__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == str(packages_of(made.module) / "torch/__init__.py")
    assert "nothing to do" in setup(made.beside_module).stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--fast"], "unknown option --fast"), (["--python"], "--python needs"), (["--python", "/nowhere"], "no Python")],
)
def test_a_wrong_command_line_is_one_line_and_changes_nothing(copy: Path, options: list[str], said: str) -> None:
    assert said in error_of(setup(copy, *options), exits.USAGE)
    assert not (copy / ".venv").exists()


@pytest.mark.parametrize("named", [True, False])
def test_an_old_python_is_refused_by_its_version(copy: Path, tmp_path: Path, named: bool) -> None:
    old = [script(tmp_path / f"bin/python3{minor}", "#!/bin/sh\necho Python 3.8.10\n") for minor in OLD]
    options = ["--python", str(old[0])] if named else []
    ended = setup(copy, *options, environ={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})
    line = error_of(ended, exits.REFUSED)
    assert "python3 is Python 3.8.10, Muster needs 3.10 or newer" in line
    assert not (copy / ".venv").exists()


def test_a_read_only_folder_is_said_to_be_one(copy: Path) -> None:
    copy.chmod(0o555)
    try:
        assert "is read-only for user" in error_of(setup(copy, before=BOUND), exits.RUN_FOLDER)
    finally:
        copy.chmod(0o755)


def test_a_disk_that_takes_no_more_is_said_to_be_full(copy: Path) -> None:
    # No file over 100 KiB: a write that the disk does not take. Without the trap a signal would end the writer first.
    limited = ["bash", "-c", 'trap \'\' XFSZ; ulimit -f 100; exec "$0" "$@"']
    assert "full" in error_of(setup(copy, "--launcher-only", before=limited), exits.STORAGE)


def test_help_names_every_option_that_is_parsed() -> None:
    text = (REPOSITORY / "setup.sh").read_text()
    parsed = {
        "--dev",
        "--cpu",
        "--cuda",
        "--launcher-only",
        "--python",
        "--system-site-packages",
        "--no-hashes",
        "--help",
    }
    shown = setup(REPOSITORY, "--help")
    assert shown.returncode == 0
    assert {word for word in shown.stdout.split() if word.startswith("--")} == parsed
    assert all(f"{option})" in text or f"{option} |" in text or f"| {option})" in text for option in parsed)


def pin(name: str, version: str, digest: str) -> str:
    return f"{name}=={version} \\\n    --hash=sha256:{digest}\n"


def torch_wheel(version: str, cuda: str) -> bytes:
    """Build a wheel that says about itself what torch does; pip must not look for what it needs."""
    files = {"torch/__init__.py": "", "torch/version.py": f"__version__ = '{version}'\ncuda: str | None = {cuda}\n"}
    return wheel("torch", version, files, requires="not-listed")


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Call setup.sh beside a half-made virtual environment, which is begun anew, without pins and packages.

    The virtual environment and pip take most of the time.
    """
    folder = copy_to(tmp_path_factory.mktemp("setup") / "launcher", packages=())
    require(folder)
    script(folder / ".venv/bin/python", "#!/bin/sh\necho 'Python 3.11.0'\n")
    (folder / ".venv/setup.state").touch()
    ended = setup(folder, "--launcher-only", environ=NO_NETWORK)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "making .venv" in ended.stdout
    assert (folder / ".venv/bin/python").is_symlink()
    return folder


@pytest.fixture
def ready(launcher: Path, tmp_path: Path) -> Path:
    """A copy of that folder with its virtual environment, as if setup.sh had been called there."""
    folder = tmp_path / "copy"
    shutil.copytree(launcher, folder, symlinks=True)
    state = folder / ".venv/setup.state"
    state.write_text(state.read_text().replace(f"repository={launcher}\n", f"repository={folder}\n"))
    assert "ready, nothing to do" in setup(folder, "--launcher-only", environ=NO_NETWORK).stdout
    return folder


@pytest.fixture
def index() -> Iterator[PackageIndex]:
    with serving(PackageIndex()) as served:
        yield served


def using(index: PackageIndex) -> dict[str, str]:
    """Return the environment in which pip knows one index only."""
    return {**NO_NETWORK, "PIP_INDEX_URL": index.address}


def require(copy: Path, **files: str) -> None:
    """Replace the pins of a copy."""
    for name in ("core", "torch", "cuda", "dev"):
        (copy / f"requirements/{name}.txt").write_text("# pins\n" + files.get(name, ""))


def test_a_changed_wheel_is_refused_in_one_line_and_without_hashes_it_is_installed(
    ready: Path, index: PackageIndex
) -> None:
    listed, offered = (wheel("leaf", "1.0", {"leaf.py": f"value = {value}"}) for value in (1, 2))
    index.add("leaf", "1.0", offered)
    require(ready, core=pin("leaf", "1.0", sha256(listed)))
    refused = error_of(setup(ready, "--launcher-only", environ=using(index)), 1)
    assert f"the file of leaf==1.0 has the SHA-256 {sha256(offered)}, expected one that requirements/ lists" in refused
    assert refused.endswith("If your package mirror rebuilds wheels, call again with --no-hashes")
    assert not list(ready.glob(".venv/lib/*/site-packages/leaf.py"))
    taken = setup(ready, "--launcher-only", "--no-hashes", environ=using(index))
    assert taken.returncode == 0, taken.stdout + taken.stderr
    assert packages_of(ready / ".venv").joinpath("leaf.py").read_text() == "value = 2"
    # It stays so: the next version is installed from the same mirror by a plain call.
    index.add("leaf", "1.1", wheel("leaf", "1.1", {"leaf.py": "value = 3"}))
    require(ready, core=pin("leaf", "1.1", sha256(listed)))
    later = setup(ready, "--launcher-only", environ=using(index))
    assert later.returncode == 0, later.stdout + later.stderr


@pytest.mark.parametrize(
    ("options", "driver", "cpu"),
    only_some(
        [(["--cpu"], True, True), ([], False, True), ([], True, False), (["--cuda"], False, False)],
        [(["--cpu"], True, True), ([], False, True), ([], True, False)],  # the second ends with --cuda
    ),
)
def test_each_package_comes_from_one_index_and_cuda_only_beside_a_build_for_cuda(
    ready: Path, index: PackageIndex, options: list[str], driver: bool, cpu: bool
) -> None:
    leaf = index.add("leaf", "1.0", wheel("leaf", "1.0", {"leaf.py": ""}))
    library = index.add("nvidia_x", "1.0", wheel("nvidia_x", "1.0", {"nvidia_x.py": ""}))
    plain = index.add("torch", "9.0", torch_wheel("9.0", "'13.0'"))
    with serving(PackageIndex()) as cpu_index:
        local = cpu_index.add("torch", "9.0+cpu", torch_wheel("9.0+cpu", "None"))
        cpu_index.add("leaf", "1.0", wheel("leaf", "1.0", {"leaf.py": "raise SystemExit('the wrong one')"}))
        script = (ready / "setup.sh").read_text()
        named = "CPU_INDEX=https://download.pytorch.org/whl/cpu\n"
        files = "DRIVER_FILES=(/dev/nvidiactl /proc/driver/nvidia/version /dev/dxg)"
        assert named in script
        assert files in script
        script = script.replace(named, f"CPU_INDEX={cpu_index.address}\n")
        (ready / "setup.sh").write_text(script.replace(files, f"DRIVER_FILES=(/none {'/dev/null' if driver else ''})"))
        hashes = f"torch==9.0 \\\n    --hash=sha256:{plain} \\\n    --hash=sha256:{local}\n"
        require(ready, torch=pin("leaf", "1.0", leaf) + hashes, cuda=pin("nvidia-x", "1.0", library))
        ended = setup(ready, *options, environ=using(index))
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert f"torch 9.0{'+cpu' if cpu else ''}" in ended.stdout
        assert set(cpu_index.asked) == ({"torch"} if cpu else set())
        assert set(index.asked) == ({"leaf"} if cpu else {"leaf", "torch", "nvidia-x"})
        assert ("call ./setup.sh --cuda" in ended.stdout) == (not options and not driver)
        assert "nothing to do" in setup(ready, environ=using(index)).stdout  # a plain call keeps the build
        # A build that is listed nowhere is refused, whatever its index says about it.
        (cpu_index if cpu else index).add("torch", "9.1+cpu", torch_wheel("9.1+cpu", "None"))
        require(ready, torch=pin("leaf", "1.0", leaf) + hashes.replace("9.0", "9.1"))
        refused = error_of(setup(ready, *options, environ=using(index)), 1)
        assert "the file of torch==9.1+cpu has the SHA-256" in refused
        if not options and not driver:  # the default can be changed later
            require(ready, torch=pin("leaf", "1.0", leaf) + hashes, cuda=pin("nvidia-x", "1.0", library))
            assert "torch 9.0)" in setup(ready, "--cuda", environ=using(index)).stdout


@needs_root
def test_another_user_cannot_hold_the_lock(copy: Path) -> None:
    with public_folder(0o755) as folder:
        copied = copy_to(folder / "copy", packages=())
        setup(copied, "--python", "/nowhere")
        tried = subprocess.run(
            [*AS_ATTACKER, "flock", copied / ".setup.lock", "true"], capture_output=True, check=False
        )
        assert b"Permission denied" in tried.stderr
        # What that user can read, such as the script itself, is not a lock.
        hold = [
            *AS_ATTACKER,
            "flock",
            "--no-fork",
            "--nonblock",
            copied / "setup.sh",
            "sh",
            "-c",
            "echo; exec sleep 60",
        ]
        with subprocess.Popen(hold, stdout=subprocess.PIPE) as held:
            assert held.stdout.readline() == b"\n"
            try:
                again = setup(copied, "--python", "/nowhere")
            finally:
                held.kill()
        assert "waiting" not in again.stdout


@installing
def test_two_calls_at_once_take_turns(made: Made) -> None:
    assert sum("making .venv" in said for said in made.said) == 1
