"""Programs that use a session wrongly: one message, which rank, what to do, and an exit code. Nothing hangs."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from muster.jobs.basics import exits
from muster.launch.cli import main
from support.programs import Programs

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow]

DEADLINE_S = 60

ALONE = {  # program; what it says
    "twice": (
        "muster.session()\nmuster.session()",
        "muster: rank 0: session: it was already opened at ",
    ),
    "half an environment": (
        "import os\nos.environ['RANK'] = '1'\nmuster.session()",
        "muster: rank 1: environment: RANK=1 is set without its partner",
    ),
    "a value that cannot be stored": (
        "run = muster.session()\nrun.state(f=print)",
        "muster: rank 0: state: f: a function cannot be stored",
    ),
    "steps and save mixed": (
        "run = muster.session()\ns = run.state(a=1)\nfor i in run.steps(3, s):\n    run.save(s, i + 1)",
        "muster: rank 0, after 1 steps: run.steps: step 0 was counted twice; use run.save only in loops without",
    ),
    "a save of an earlier step": (
        "run = muster.session()\ns = run.state(a=1)\nrun.save(s, 5)\nrun.save(s, 4)",
        "muster: rank 0, after 5 steps: run.save: step must be larger than 5, got 4; pass the number of steps done",
    ),
    "a loop in a loop": (
        "run = muster.session()\ns = run.state(a=1)\nfor i in run.steps(3, s):\n    for j in run.steps(3, s): pass",
        "muster: rank 0, after 0 steps: session: a loop of run.steps or run.epochs is active; end it before",
    ),
    "a text that is logged": (
        "run = muster.session()\nfor i in run.steps(3):\n    run.log(loss='low')",
        "muster: rank 0, after 0 steps: run.log: loss must be a number, got str; log its mean or sum",
    ),
    "a path that leads out": (
        "run = muster.session()\nrun.path('../x')",
        "muster: rank 0: run.path: '../x' is not a path inside the run's folder of files; pass one such as plots",
    ),
    "a run that is not there": (
        "import os\nos.environ['MUSTER_RESUME'] = 'none'\nrun = muster.session()\nrun.restore(run.state(a=1))",
        "muster: rank 0: ",
    ),
    "a forked process": (
        "import os\nrun = muster.session()\nif os.fork() == 0:\n    muster.session()\nsys.exit(os.wait()[1] >> 8)",
        "muster: rank 0: session: this is a worker process of a rank, such as a DataLoader's; open the session only in",
    ),
    "a spawned process": (
        "import multiprocessing as m\nif __name__ != '__main__': muster.session()\nif __name__ == '__main__':\n"
        "    p = m.get_context('spawn').Process(target=print)\n    p.start()\n    p.join()\n"
        "    sys.exit(p.exitcode)",
        "session: this is a worker process of a rank, such as a DataLoader's; open the session only in the main",
    ),
}


def alone(folder: Path, code: str, *launcher: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program by itself, or by a launcher."""
    script = folder / "train.py"
    script.write_text(f"import sys\nimport muster\n{code}\n")
    environ = {**os.environ, "MUSTER_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1", **more}
    argv = [sys.executable, *launcher, str(script)]
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.mark.parametrize("name", list(ALONE))
def test_one_message_and_its_exit_code(name: str, tmp_path: Path) -> None:
    code, message = ALONE[name]
    done = alone(tmp_path, code)
    assert message in done.stderr, done.stderr
    wanted = exits.NOT_FOUND if name == "a run that is not there" else exits.REFUSED
    assert done.returncode == wanted, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


def test_an_error_of_the_program_is_its_own_traceback_with_rank_and_step(tmp_path: Path) -> None:
    code = "run = muster.session()\ndef train(i):\n    return 1 / (2 - i)\nfor i in run.steps(9):\n    train(i)"
    done = alone(tmp_path, code)
    assert done.returncode == 1
    trace, _, last = done.stderr.rpartition("muster: ")
    assert last == "rank 0, after 2 steps: ZeroDivisionError\n"
    assert "in train\n" in trace
    assert trace.endswith("ZeroDivisionError: division by zero\n")
    assert "session" not in trace.replace("muster.session()", "")


START = "import torch\nimport torch.distributed as dist\nrun = muster.session()\n"
GROUP = START + "dist.init_process_group('gloo')\n"
RANKS = {
    "no process group": (
        START + "for i in run.steps(3): pass",
        "session: the 2 ranks cannot agree, because torch.distributed is not initialized; call",
    ),
    "a state that differs": (
        GROUP + "torch.manual_seed(0)\nfor i in run.steps(3, run.state(m=torch.nn.Linear(2, 2), n=run.rank)): pass",
        "state: n is 1 on rank 1, but n is 0 on rank 0; register the same objects with the same values on every rank",
    ),
    "more than there is memory for": (
        # The limit is one of files, which the memory that a writer process shares is to the kernel.
        GROUP + "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 24, 1 << 24))\n"
        "for i in run.steps(3, run.state(m=torch.zeros(1 << 24))): pass",
        "checkpoint: the copy of a rank's 64 MB does not fit into memory: File too large; use fewer ranks per node",
    ),
}


@pytest.mark.parametrize("name", list(RANKS))
def test_all_ranks_refuse_together(name: str, programs: Programs, tmp_path: Path) -> None:
    code, message = RANKS[name]
    script = tmp_path / "train.py"
    script.write_text(f"import sys\nimport muster\n{code}\n")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = str(listening.getsockname()[1])
    env = {**os.environ, "MUSTER_RUNS": str(tmp_path / "runs"), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    started = [programs.start(script, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    ended = [each.wait() for each in started]
    said = rf"^muster: rank \d.*: {re.escape(message)}"
    assert {each.returncode for each in ended if re.search(said, each.stderr, re.MULTILINE)} == {exits.REFUSED}, ended
    assert all(each.returncode for each in ended), ended


@pytest.mark.timeout(150)
def test_muster_run_ends_with_what_its_ranks_refuse(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, message = RANKS["a state that differs"]
    script = tmp_path / "train.py"
    script.write_text(f"import sys\nimport muster\n{code}\n")
    ended = main(["run", "-n", "2", "--runs", str(tmp_path / "runs"), sys.executable, str(script)])
    said = capfd.readouterr()
    assert message in said.out + said.err, said
    assert "muster: rank " in said.out + said.err
    assert ended == exits.REFUSED


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ["--set", "python=/no/such/python", "train.py"],
            exits.REFUSED,
            "python: /no/such/python: no such file; correct",
        ),
        (["--", "./program"], 126, "chmod +x it, name its interpreter first"),
        (["--", "no-such-program"], 127, "no-such-program"),
    ],
)
def test_a_program_that_cannot_start(
    words: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "program"):
        (tmp_path / name).write_text("print('never')\n")
    ended = main(["run", "--runs", str(tmp_path / "runs"), *words])
    said = capfd.readouterr().err
    assert message in said
    assert ended == code, said
