"""How a program with a session ends: nothing of the session's outlives it."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.jobs.basics import exits
from muster.jobs.basics.errors import StorageError
from muster.jobs.basics.files import read_lines
from muster.jobs.runfolder.direct import record, write_end
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.session.place import read_place
from muster.jobs.session.session import Session

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

# What is registered first is called last: here, after the session has ended.
PROGRAM = """
import atexit, os, sys
from pathlib import Path

def gloo_threads():
    return [each for each in Path("/proc/self/task").glob("*/comm") if each.read_text().startswith("pt_gloo")]

atexit.register(lambda: print("gloo threads", before, len(gloo_threads()), flush=True))

import torch, torch.distributed as dist, muster
from muster.ddp.bucketed import BucketedDDP

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(os.environ["RANK"]), world_size=2)
run = muster.session()
model = BucketedDDP(torch.nn.Linear(2, 1))
state = run.state(model=model, best=0.0)  # a script's names live as long as the interpreter
for step in run.steps(2, state):
    model(torch.ones(1, 2)).sum().backward()
    model.finish_gradient_synchronization()
    run.log(loss=1.0)
del model, step
before = len(gloo_threads())
"""


def test_no_gloo_thread_outlives_the_session(tmp_path: Path) -> None:
    """One that frees a tensor while the interpreter ends would abort the process: exit code 134 after all is done."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "meeting")],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "1",  # the program meets in a file
                "MUSTER_RUNS": str(tmp_path),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        said, _ = rank.communicate(timeout=100)
        assert rank.returncode == 0, said
        words = said.split("gloo threads ")[1].split()
        assert int(words[0]) >= 2
        assert int(words[1]) == 0, said


LEAVING = """
import pickle, sys, muster
from argparse import ArgumentParser
from sys import exit as own_exit
run = muster.session()
for step in run.steps(2, run.state(x=0)):
    try:
        sys.exit(9)
    except SystemExit as caught:
        assert caught.code == pickle.loads(pickle.dumps(caught)).code == 9
"""


def ran(folder: Path, last: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Run a program with a session that ends with the lines `last`; return also the recorded ends."""
    done = subprocess.run(
        [sys.executable, "-c", LEAVING + last],
        env={**os.environ, "MUSTER_RUNS": str(folder / "runs")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    [run] = (folder / "runs").iterdir()
    return done, list(read_lines(RunDir(run).attempts))


@pytest.mark.parametrize(
    ("last", "code", "message"),
    [
        ("sys.exit(3)", 3, "rank 0 ended with exit code 3"),
        ("sys.exit('no more data')", 1, "rank 0 ended with exit code 1"),
        ("sys.exit()", 0, "done"),
        ("own_exit(5)", 5, "rank 0 ended with exit code 5"),
        ("ArgumentParser().error('no')", 2, "rank 0 ended with exit code 2"),
        ("raise KeyboardInterrupt", 130, "stopped by the user"),
        ("raise ValueError('x')", 1, "rank 0: ValueError: x"),
        ("sys.excepthook = print\nraise ValueError('x')", 1, "rank 0: ValueError: x"),
        ("", 0, "done"),
    ],
)
def test_the_exit_code_of_a_program_that_muster_did_not_start_is_recorded(
    tmp_path: Path, last: str, code: int, message: str
) -> None:
    """One that the program itself catches, as tests of command lines do, is not."""
    done, rows = ran(tmp_path, last)
    assert done.returncode % 256 == (code if code != 130 else -signal.SIGINT % 256), done.stderr
    assert ("no more data" in done.stderr) == ("no more" in last)
    [row] = rows
    assert (row["code"], row["message"]) == (code, message)


def test_an_exit_that_is_not_seen_is_not_recorded_as_done(tmp_path: Path) -> None:
    done, [row] = ran(tmp_path, "raise SystemExit(4)")
    assert done.returncode == 4
    assert (row["code"], row["message"]) == (1, "rank 0 did not say how it ended; its exit code is not known")


def test_a_program_that_ends_by_os_exit_records_no_end(tmp_path: Path) -> None:
    done, rows = ran(tmp_path, "import os\nos._exit(3)")
    assert (done.returncode, rows) == (3, [])
    [folder] = (tmp_path / "runs").iterdir()
    assert "ended" not in [row["event"] for row in read_lines(RunDir(folder).events)]


def test_a_last_save_that_fails_is_how_the_program_ended(tmp_path: Path) -> None:
    def settle() -> None:
        raise StorageError("three saves failed in a row")

    made = Session(read_place({}, "demo"), runs=None, tensorboard=False)
    start = SimpleNamespace(direct=True, run=RunDir(tmp_path), attempt=0)
    made._loop_made = SimpleNamespace(settle=settle, start=start, stopped_with=0)  # type: ignore[assignment]
    with pytest.raises(StorageError):
        made.close()
    [row] = read_lines(RunDir(tmp_path).attempts)
    assert (row["code"], row["message"]) == (exits.STORAGE, "three saves failed in a row")


@pytest.mark.parametrize(("status", "code"), [(0, 0), (None, 0), ("text", 1), (3, 3)])
def test_a_training_that_leaves_by_a_system_exit_is_recorded_with_its_code(
    tmp_path: Path, status: Any, code: int
) -> None:
    def work() -> int:
        raise SystemExit(status)

    with pytest.raises(SystemExit):
        record(RunDir(tmp_path), 0, work)
    [row] = read_lines(RunDir(tmp_path).attempts)
    assert (row["code"], row["class"]) == (code, exits.class_of(code))


def test_an_end_that_cannot_be_recorded_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_end(RunDir(tmp_path / "removed"), 0, 1.0, 0, "done")
    assert capsys.readouterr().err.startswith("muster: the end of the run was not recorded: ")
