"""A user's own files that are called like Muster's packages: in the working folder, on PYTHONPATH, in site-packages."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.jobs.basics.boot import module_argv
from muster.jobs.runfolder.rundir import list_runs
from muster.jobs.spec import yamlfile
from support.box import LiveBox
from support.live import DEADLINE_S
from support.sshd import ADDRESSES, Sshd

pytestmark = pytest.mark.ranks

NAMES = ("muster", "cloudlab", "collectives_bench", "ddp", "jobs", "launch", "pipe", "slurm", "zero")
# A process of Muster's that imports one of these ends; the user's own program, which sets OWN, finds all of them.
THEIRS = "import os\nif 'OWN' not in os.environ: raise SystemExit(f'{__file__} was imported')\nMINE = __name__\n"
TRAINING = "nodes: 2\ntrain: {model: vgg11, data: digits, mode: zero1, batch_size: 32, steps: 2}\n"
PROGRAM = f"import {', '.join(NAMES)}; print(*(each.MINE for each in ({', '.join(NAMES)})))"

Muster = Callable[..., tuple[Path, subprocess.CompletedProcess[str]]]


def write_theirs(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        (folder / f"{name}.py").write_text(THEIRS)


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

    def call(transport: str, job: str) -> tuple[Path, subprocess.CompletedProcess[str]]:
        write_theirs(tmp_path)
        (tmp_path / "job.yaml").write_text(job)
        lines = [f"n{number} ssh={each} port={sshd.port} address=127.0.0.1\n" for number, each in enumerate(ADDRESSES)]
        (tmp_path / "hosts").write_text("".join(lines))
        ssh = {"ssh": {"options": sshd.options()}, "hosts": "hosts"} if transport != "local" else {}
        (tmp_path / "site.yaml").write_text(yamlfile.dump({"interpreter": str(python), **ssh}))
        words = ["run", "job.yaml", "--site", "site.yaml", "--on", transport, "--runs", str(tmp_path / "runs")]
        argv = [*module_argv(str(python), "muster.launch.cli"), *words]
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
        return tmp_path / "runs", done

    return call


@pytest.mark.parametrize("transport", ["local", "ssh", "pdsh"])
def test_ranks_of_ours_never_import_the_users_files(muster: Muster, transport: str) -> None:
    _, done = muster(transport, TRAINING)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "was imported" not in done.stdout + done.stderr


@pytest.mark.parametrize("transport", ["local", "ssh", "pdsh"])
def test_a_program_of_the_users_finds_its_own(muster: Muster, python: Path, transport: str) -> None:
    runs, done = muster(transport, yamlfile.dump({"env": {"OWN": "1"}, "command": [str(python), "-c", PROGRAM]}))
    assert done.returncode == 0, done.stdout + done.stderr
    assert list_runs(runs)[0].attempt(0).out(0).read_text().split() == list(NAMES)


@pytest.mark.cluster
@pytest.mark.timeout(240)
@pytest.mark.parametrize("transport", ["slurm", "submitit"])
def test_neither_does_a_job_of_slurms(tmp_path: Path, python: Path, box: LiveBox, transport: str) -> None:
    write_theirs(tmp_path)
    (tmp_path / "job.yaml").write_text(TRAINING)
    (tmp_path / "site.yaml").write_text(yamlfile.dump({"interpreter": str(python)}))
    executor = ["--executor", "slurm"] * (transport == "submitit")
    on = ["--on", transport, *executor, "--hosts", box.spelt]
    words = ["run", "job.yaml", "--site", "site.yaml", *on, "--runs", "runs"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
    argv = [*module_argv(str(python), "muster.launch.cli"), *words]
    done = subprocess.run(
        argv, cwd=tmp_path, env={**env, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "was imported" not in done.stdout + done.stderr
