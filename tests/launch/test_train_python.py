"""`python:` of a `train:` job: its ranks run in a user's Python that has torch and no package of Muster's."""

import json
import os
import signal
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from muster.jobs.basics.files import read_lines
from muster.launch.cli import main
from support.bare_torch import torch_alone
from support.live import LiveRun
from support.sshd import ADDRESSES, Sshd

pytestmark = [pytest.mark.command, pytest.mark.slow, pytest.mark.ranks]

# On PYTHONPATH, which Muster's own processes do not read: each warm process writes a line.
WITNESS = "import os, sys; print(sys.prefix, *sys.orig_argv, file=open(os.environ.get('WITNESS', os.devnull), 'a'))\n"
TRAIN = {
    "model": {"d_model": 16, "d_ff": 32, "layers": 2, "heads": 2},
    "data": "synthetic",
    "mode": "bucketed",
    "batch_size": 8,
    "log_every": 1,
    "evaluate": False,
}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has torch alone."""
    return torch_alone(tmp_path_factory.mktemp("their") / "a venv")


def job(folder: Path, python: object, steps: int, **keys: object) -> str:
    """Return the text of a job whose warm processes leave a line in `folder`/witness."""
    (folder / "sitecustomize.py").write_text(WITNESS)
    env = {"PYTHONPATH": str(folder), "WITNESS": str(folder / "witness")}
    train = {**TRAIN, "steps": steps}
    return json.dumps({"nodes": 2, "python": python, "env": env, "grace_s": 1, **keys, "train": train})


def test_pretend_nodes_train_in_one_warm_process_of_that_python_and_restart_from_a_checkpoint(
    bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    relative = os.path.relpath(bare, tmp_path)
    live = LiveRun(tmp_path, job(tmp_path, relative, 300, checkpoint={"every_steps": 10}, restart={"max": 1}))
    live.wait_for("saved")
    os.kill(live.pid_of(1), signal.SIGKILL)
    assert live.end() == 0, live.err
    first, second = read_lines(live.run.attempts)
    assert (first["first"]["rank"], first["first"]["signal"]) == (1, "SIGKILL")
    assert second["code"] == 0
    assert json.loads(live.run.attempt(1).resume.read_text())["step"] >= 10
    (warm,) = (tmp_path / "witness").read_text().splitlines()
    prefix = str(bare.parents[1])
    assert warm.startswith(f"{prefix} {tmp_path}/{relative} ")
    assert "muster.jobs.node.warm" in warm
    assert main(["plan", str(tmp_path / "job.yaml")]) == 0
    assert f"  python     '{tmp_path}/{relative}' (job file: python)" in capsys.readouterr().out.splitlines()


def test_nodes_train_in_a_python_that_their_setup_lines_bring(bare: Path, tmp_path: Path, sshd: Sshd) -> None:
    lines = [f"n{number} ssh={each} port={sshd.port} address=127.0.0.1\n" for number, each in enumerate(ADDRESSES)]
    (tmp_path / "hosts").write_text("".join(lines))
    site = {"ssh": {"options": sshd.options()}, "hosts": "hosts", "setup": [f"export PATH='{bare.parent}':$PATH"]}
    (tmp_path / "site.yaml").write_text(json.dumps(site))
    live = LiveRun(tmp_path, job(tmp_path, ["env", "THEIRS=1", "python"], 3), "--site", str(tmp_path / "site.yaml"))
    assert live.end() == 0, live.err
    assert [row["step"] for row in read_lines(live.run.metrics) if "loss" in row] == [1, 2, 3]
    warm = (tmp_path / "witness").read_text().splitlines()
    assert [line.startswith(f"{bare.parents[1]} python ") for line in warm] == [True, True]


@pytest.mark.parametrize(
    ("python", "said"),
    [
        (f"{sys.base_prefix}/bin/python3", "No module named 'torch'; install torch for this Python, or set python in"),
        ("/bin/true", "python: /bin/true: ended before it could start ranks; it must be Python 3.10 or newer"),
        ("{folder}/text", "python: {folder}/text: Exec format error; correct `python` in the job file"),
    ],
)
def test_a_python_that_cannot_run_ranks_is_one_refusal(python: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    (tmp_path / "text").chmod(0o755)
    live = LiveRun(tmp_path, job(tmp_path, python.format(folder=tmp_path), 3))
    assert live.end() == 78
    (line,) = (line for line in live.err.splitlines() if line.startswith("muster: "))
    assert said.format(folder=tmp_path) in line
    assert "Traceback" not in live.err


def test_check_asks_that_python_for_its_torch(bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(job(tmp_path, str(bare), 3))
    assert main(["check", "--json", str(tmp_path / "job.yaml"), "--runs", str(tmp_path / "runs")]) == 0
    asked = [node["facts"] for node in json.loads(capsys.readouterr().out)["nodes"]]
    assert [facts["executable"] for facts in asked] == [str(bare)] * 2
    assert [facts["torch"] for facts in asked] == [version("torch")] * 2
    (tmp_path / "job.yaml").write_text(job(tmp_path, f"{sys.base_prefix}/bin/python3", 3))
    assert main(["check", str(tmp_path / "job.yaml"), "--runs", str(tmp_path / "runs")]) == 78
    assert "python3 has no torch, which the ranks need; install it there, or set python in" in capsys.readouterr().out
