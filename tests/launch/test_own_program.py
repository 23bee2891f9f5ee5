"""A program on the command line in the place of a job file: what is ours, what is its, and which Python it gets."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from muster.jobs.runfolder.rundir import list_runs
from muster.launch.cli import main
from muster.launch.commands import run as command
from muster.launch.common.program_words import job_text, split
from support.live import DEADLINE_S
from support.sshd import ADDRESSES, Sshd

pytestmark = pytest.mark.command

SCRIPT = "import os, sys; print(sys.prefix, os.environ['RANK'], *sys.argv[1:])\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with programs and a job file; no environment is active."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "job.yaml").write_text("command: ['true']\n")
    for name, mode in (("prog", 0o755), ("data", 0o644)):
        (tmp_path / name).write_text('#!/bin/sh\necho "$0 $@"\n')
        (tmp_path / name).chmod(mode)
    monkeypatch.chdir(tmp_path)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "MUSTER_SITE", "MUSTER_RUNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment of the user's."""
    folder = tmp_path_factory.mktemp("their") / "a venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder


def muster(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-I", "-m", "muster", *words]
    return subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.mark.parametrize(
    ("line", "ours", "program"),
    [
        ("-n 4 train.py --lr 3e-4 -n 2", "-n 4", "train.py --lr 3e-4 -n 2"),
        ("-N 2 -- python train.py -- x", "-N 2", "python train.py -- x"),
        ("--set a=train.py --quiet prog -x", "--set a=train.py --quiet", "./prog -x"),
        ("--runs=x -N2 ./prog", "--runs=x -N2", "./prog"),
        ("job.yaml -n 4 --quiet", "job.yaml -n 4 --quiet", ""),
        ("-n 4 none.sh", "-n 4", "none.sh"),
        ("--restart train.py", "--restart=default", "train.py"),
        ("--restart 3 job.yaml", "job.yaml --restart 3", ""),
        ("--restart job.yaml", "job.yaml --restart=default", ""),
        ("-x --lr train.py", "-x --lr", "train.py"),
        ("--unknown train.py", "--unknown", "train.py"),
    ],
)
def test_what_stands_before_the_program_is_ours_and_what_follows_is_its(
    folder: Path, line: str, ours: str, program: str
) -> None:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    assert split(parser, line.split()) == (ours.split(), program.split())


@pytest.mark.parametrize(
    ("line", "name", "argv"),
    [
        ("sub/my train.py|--lr|1", "my-train", ["python", "sub/my train.py", "--lr", "1"]),
        ("x.sh", "x", ["bash", "x.sh"]),
        ("torchrun|--nproc|2|train.py", "train", ["torchrun", "--nproc", "2", "train.py"]),
        ("python|-m|pkg.train", "pkg.train", ["python", "-m", "pkg.train"]),
        ("./prog|3e-4|yes", "prog", ["./prog", "3e-4", "yes"]),
    ],
)
def test_a_program_becomes_a_job_named_after_its_script(line: str, name: str, argv: list[str], tmp_path: Path) -> None:
    from muster.jobs.spec.load import load_job
    from muster.launch.common.kinds import KINDS

    job = load_job(Path("command line"), KINDS, text=job_text(line.split("|"))).job
    assert (job.name, job.settings.model_dump()) == (name, {"argv": argv})


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["none.py"], 78, "command line: {folder}/none.py: no such file; correct the name, or set workdir"),
        (["--", "python", "none.py"], 78, "command line: {folder}/none.py: no such file"),
        (["data"], 78, "data: is a program, but not executable; run: chmod +x data"),
        (
            ["python3", "train.py"],
            2,
            "python3: no such job file; a program on PATH is started by: muster ... -- python3",
        ),
        ([f"{'x' * 300}.py"], 78, "x.py: no such file"),
        (["--"], 2, "--: no program follows"),
        (["job.yaml", "--", "prog"], 2, "--: a job is given as well (job.yaml)"),
        (["--", ""], 65, "command line: command: the first item is the program to run, and it is empty"),
        (["-N", "300", "train.py"], 78, "--set nodes=300: nodes: must be at most 256 on one machine"),
        (["--set", "python=no/python", "train.py"], 78, "--set python=no/python: python: {folder}/no/python: no such"),
        (["--set", "python=[none, -u]", "train.py"], 78, "python: none: not found on PATH; correct it"),
        (["--set", "python=apptainer exec x", "train.py"], 65, "write python: [apptainer, exec, x]"),
        (["--set", "python=./x", "train.yaml"], 78, "--set python=./x: python: {folder}/x: no such file; correct it"),
        (["--restart=often", "train.py"], 2, "--restart: must be a number of restarts"),
        (["--env", "1A=2", "train.py"], 2, "-x 1A=2: a variable's name"),
    ],
)
def test_what_cannot_start_is_refused_in_one_line_and_leaves_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    (folder / "train.yaml").write_text("train: {model: vgg11, data: digits}\n")
    assert main(["run", *words]) == code
    said = capsys.readouterr().err
    assert message.format(folder=folder) in said
    assert len(said.splitlines()) == 1
    assert not (folder / "runs").exists()


def test_a_plan_says_which_python_and_why(folder: Path, environment: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", str(environment))
    assert main(["plan", "--restart", "--env", "A=b", "--name", "given", "train.py", "--name", "its"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("job given: command")
    python = f"'{environment}/bin/python'"
    assert f"  every rank {python} train.py --name its" in lines
    assert f"  python     {python} (the virtual environment that is active here: VIRTUAL_ENV)" in lines


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_keeps_its_python_when_it_is_resumed_elsewhere(
    folder: Path, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "train.py").write_text(f"{SCRIPT}import pathlib; sys.exit(not pathlib.Path('again').exists())\n")
    done = muster("run", "train.py", "--lr", "3e-4", VIRTUAL_ENV=str(environment))
    assert done.returncode == 1, done.stderr
    (folder / "again").touch()
    monkeypatch.chdir("/")
    done = muster("resume", "--runs", str(folder / "runs"))
    assert done.returncode == 0, done.stderr
    run = list_runs(folder / "runs")[0]
    assert run.run_id.startswith("train-")
    said = [run.attempt(attempt).out(0).read_text() for attempt in (0, 1)]
    assert said == [f"{environment} 0 --lr 3e-4\n"] * 2


@pytest.mark.ranks
@pytest.mark.slow
def test_a_line_to_paste_and_a_sweep_start_programs_too(folder: Path, environment: Path) -> None:
    line = muster("cmd", "--master-addr", "127.0.0.1", "train.py", "--lr", "1", VIRTUAL_ENV=str(environment)).stdout
    pasted = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (pasted.returncode, pasted.stdout) == (0, f"{environment} 0 --lr 1\n"), pasted.stderr
    found = muster("sweep", "--json", "--grid", "ranks_per_node=1,2", "train.py", "--lr", "1")
    assert found.returncode == 0, found.stderr
    record = json.loads(found.stdout)
    assert (record["job"], [each["code"] for each in record["points"]]) == ("command line", [0, 0])


@pytest.mark.slow
def test_a_node_without_the_interpreter_is_named_by_check_and_by_the_run(folder: Path, sshd: Sshd) -> None:
    lines = [f"n{number} ssh={each} port={sshd.port} address=127.0.0.1\n" for number, each in enumerate(ADDRESSES)]
    (folder / "hosts").write_text("".join(lines))
    site = {"ssh": {"options": sshd.options()}, "hosts": "hosts", "python": "/nowhere/bin/python"}
    (folder / "site.yaml").write_text(json.dumps(site))
    words = ["--site", "site.yaml", "-N", "2", "train.py"]
    checked = muster("check", *words)
    assert checked.returncode == 78, checked.stderr
    assert "n[0-1]: lacks the program of the command: /nowhere/bin/python: no such file" in checked.stdout
    done = muster("run", *words)
    assert done.returncode == 127
    assert re.search(r"rank (\d) on node \1 \(\S+\) exited with code 127", done.stderr)
    assert "/nowhere/bin/python'; this node has no such file; correct the path, or set python in the job" in done.stderr
