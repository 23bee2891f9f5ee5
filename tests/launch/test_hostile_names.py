"""A user's own files that are called like Muster's packages: in the working folder, on PYTHONPATH, in site-packages."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.jobs.basics.boot import importable, module_argv
from muster.jobs.runfolder.rundir import list_runs
from muster.jobs.spec import yamlfile
from support.box import LiveBox
from support.live import DEADLINE_S
from support.soak import only_some
from support.sshd import ADDRESSES, Sshd

pytestmark = [pytest.mark.command, pytest.mark.ranks]

NAMES = ("muster", "cloudlab", "collectives_bench", "ddp", "jobs", "launch", "pipe", "slurm", "zero")
# A process of Muster's that imports one of these ends; the user's own program, which sets OWN, finds all of them.
THEIRS = "import os\nif 'OWN' not in os.environ: raise SystemExit(f'{__file__} was imported')\nMINE = __name__\n"
TRAINING = """
nodes: 2
threads_per_rank: 1
train: {model: gpt-nano, data: synthetic, mode: zero1, batch_size: 8, steps: 2, evaluate: false}
"""
PROGRAM = f"import {', '.join(NAMES)}; print(*(each.MINE for each in ({', '.join(NAMES)})))"

# The user's project: modules and packages that are called like Muster's, and a script that uses both.
PROJECT = ("jobs/__init__.py", "pipe/__init__.py", "launch.py", "ddp.py", "utils.py", "slurm.py")
SCRIPT = """\
import os, sys, ddp, jobs, launch, pipe, slurm, utils, muster, muster.ddp.buckets
from muster.jobs.basics import exits
here = os.path.dirname(os.path.abspath(__file__))
own = [each.__file__.startswith(here) for each in (ddp, jobs, launch, pipe, slurm, utils)]
print(sys.prefix, all(own), jobs.MINE, exits.REFUSED, os.path.dirname(muster.__file__), *sys.argv[1:])
"""

Muster = Callable[..., tuple[Path, subprocess.CompletedProcess[str]]]


def write_theirs(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        (folder / f"{name}.py").write_text(THEIRS)


def write_project(folder: Path) -> None:
    for name in PROJECT:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("MINE = __name__\n")
    (folder / "main.py").write_text(SCRIPT)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment of the user's, in which there is nothing."""
    folder = tmp_path_factory.mktemp("own") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose site-packages hold the user's files, before the libraries of this one."""
    folder = tmp_path_factory.mktemp("their") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-I", "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    write_theirs(Path(packages))
    Path(packages, "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture
def muster(tmp_path: Path, python: Path, sshd: Sshd) -> Muster:
    """Return a function that runs a job among the user's files, on a transport: (runs folder, what it said)."""

    def call(transport: str, job: str, *words: str, **more: str) -> tuple[Path, subprocess.CompletedProcess[str]]:
        if job:
            write_theirs(tmp_path)
            (tmp_path / "job.yaml").write_text(job)
        lines = [f"n{number} ssh={each} port={sshd.port} address=127.0.0.1\n" for number, each in enumerate(ADDRESSES)]
        (tmp_path / "hosts").write_text("".join(lines))
        ssh = {"ssh": {"options": sshd.options()}, "hosts": "hosts"} if transport != "local" else {}
        (tmp_path / "site.yaml").write_text(yamlfile.dump({"interpreter": str(python), **ssh}))
        options = ["--site", "site.yaml", "--on", transport, "--runs", str(tmp_path / "runs")]
        argv = [*module_argv(str(python), "muster.launch.cli"), "run", *options, *(words or ["job.yaml"])]
        env = {**os.environ, "PYTHONPATH": str(tmp_path), **more}
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
        return tmp_path / "runs", done

    return call


@pytest.mark.parametrize("transport", only_some(["local", "ssh", "pdsh"], ["local", "ssh"]))
def test_ranks_of_ours_never_import_the_users_files(muster: Muster, transport: str) -> None:
    _, done = muster(transport, TRAINING)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "was imported" not in done.stdout + done.stderr


@pytest.mark.parametrize("transport", only_some(["local", "ssh", "pdsh"], ["local", "ssh"]))
def test_a_program_of_the_users_finds_its_own(muster: Muster, python: Path, transport: str) -> None:
    runs, done = muster(transport, yamlfile.dump({"env": {"OWN": "1"}, "command": [str(python), "-c", PROGRAM]}))
    assert done.returncode == 0, done.stdout + done.stderr
    assert list_runs(runs)[0].attempt(0).out(0).read_text().split() == list(NAMES)


@pytest.mark.parametrize("transport", only_some(["local", "ssh", "pdsh"], ["local", "ssh"]))
def test_a_project_with_modules_named_as_ours_imports_both(
    muster: Muster, environment: Path, tmp_path: Path, transport: str
) -> None:
    write_project(tmp_path)
    runs, done = muster(transport, "", "-N", "2", "main.py", "--name", "x", VIRTUAL_ENV=str(environment))
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [str(environment), "True", "jobs", "78", f"{importable()}/muster", "--name", "x"]
    attempt = list_runs(runs)[0].attempt(0)
    assert [attempt.out(rank).read_text().split() for rank in range(2)] == [expected] * 2


@pytest.mark.cluster
@pytest.mark.timeout(240)
@pytest.mark.parametrize("transport", only_some(["slurm", "submitit"], ["slurm"]))
def test_so_it_does_in_a_job_of_slurms(
    tmp_path: Path, environment: Path, python: Path, box: LiveBox, transport: str
) -> None:
    write_project(tmp_path)
    (tmp_path / "site.yaml").write_text(yamlfile.dump({"interpreter": str(python)}))
    done = in_slurm(tmp_path, python, box, transport, "main.py", "--name", "x", VIRTUAL_ENV=str(environment))
    assert done.returncode == 0, done.stdout + done.stderr
    run = list_runs(tmp_path / "runs")[0]
    found = run.attempt(0).out(0).read_text().split()
    assert found == [str(environment), "True", "jobs", "78", f"{run.code}/muster/importable/muster", "--name", "x"]


def in_slurm(
    folder: Path, python: Path, box: LiveBox, transport: str, *words: str, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a job from a folder that holds a site file, in the box's Slurm."""
    options = ["--site", "site.yaml", "--on", transport, "--hosts", box.spelt, "--runs", "runs"]
    argv = [*module_argv(str(python), "muster.launch.cli"), "run", *options, *words]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
    env |= {"PYTHONPATH": str(folder), **more}
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.mark.cluster
@pytest.mark.timeout(240)
@pytest.mark.parametrize("transport", only_some(["slurm", "submitit"], ["slurm"]))
def test_neither_does_a_job_of_slurms(tmp_path: Path, python: Path, box: LiveBox, transport: str) -> None:
    write_theirs(tmp_path)
    (tmp_path / "job.yaml").write_text(TRAINING)
    (tmp_path / "site.yaml").write_text(yamlfile.dump({"interpreter": str(python)}))
    done = in_slurm(tmp_path, python, box, transport, "job.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "was imported" not in done.stdout + done.stderr
