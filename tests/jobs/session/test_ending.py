"""How a program with a session ends: nothing of the session's outlives it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.jobs.basics.files import read_lines
from muster.jobs.runfolder.rundir import RunDir

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
run = muster.session()
for step in run.steps(2, run.state(x=0)):
    try:
        sys.exit(9)
    except SystemExit as caught:
        assert caught.code == pickle.loads(pickle.dumps(caught)).code == 9
"""


@pytest.mark.parametrize(
    ("last", "code", "message"),
    [
        ("sys.exit(3)", 3, "rank 0 ended with exit code 3"),
        ("sys.exit('no more data')", 1, "rank 0 ended with exit code 1"),
        ("sys.exit()", 0, "done"),
        ("", 0, "done"),
    ],
)
def test_the_exit_code_of_a_program_that_muster_did_not_start_is_recorded(
    tmp_path: Path, last: str, code: int, message: str
) -> None:
    """One that the program itself catches, as tests of command lines do, is not."""
    done = subprocess.run(
        [sys.executable, "-c", LEAVING + last],
        env={**os.environ, "MUSTER_RUNS": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == code, done.stderr
    assert ("no more data" in done.stderr) == ("no more" in last)
    [folder] = tmp_path.iterdir()
    [row] = read_lines(RunDir(folder).attempts)
    assert (row["code"], row["message"]) == (code, message)
