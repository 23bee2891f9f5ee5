"""Signals to all processes of a program with a session: its workers and the writer of checkpoints leave them to it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from muster.jobs.checkpoint.writer import SaveOrder
from muster.jobs.machine import linux
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.saving.helper import WriterProcess
from support.programs import Programs

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

TRAINING = """
import os, signal, subprocess, sys, torch, muster
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        if index == 30:  # a program of a worker does not inherit its mask
            with subprocess.Popen(["sleep", "1000"]) as child:
                child.terminate()
                assert child.wait() == -signal.SIGTERM
        return torch.tensor([float(index)])

def main(number, how, context):
    run = muster.session()
    model = torch.nn.Linear(1, 1)
    state = run.state(model=model)
    loader = DataLoader(Samples(), batch_size=4, num_workers=2, multiprocessing_context=context)
    if how == "steps":
        source = iter(loader)
        batches = (next(source) for _ in run.steps(1000, state))
    else:
        batches = (batch for _ in run.epochs(1, state) for batch in run.batches(loader))
    for done, batch in enumerate(batches):
        model(batch).mean().backward()
        if done == 20:
            os.killpg(0, number)
        if number == signal.SIGUSR1 and done > 20 and list((run.folder / "checkpoints").glob("step-*/MANIFEST.json")):
            print("saved and continued", flush=True)
            number = signal.SIGUSR2
            os.killpg(0, number)

if __name__ == "__main__":
    main(signal.Signals[sys.argv[1]], *sys.argv[2:])
"""


def run_program(tmp_path: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(text)
    return subprocess.run(
        [sys.executable, str(program), *words],
        env={**os.environ, "MUSTER_RUNS": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=100,
    )


@pytest.mark.parametrize(
    ("name", "how", "context", "code"),
    [
        ("SIGTERM", "batches", "fork", 75),
        ("SIGTERM", "batches", "spawn", 75),
        ("SIGTERM", "steps", "forkserver", 75),
        ("SIGINT", "steps", "fork", 130),
        ("SIGUSR2", "batches", "fork", 75),
        ("SIGUSR1", "batches", "fork", 75),
    ],
)
def test_a_signal_to_all_processes_saves_although_a_loader_has_workers(
    programs: Programs, tmp_path: Path, name: str, how: str, context: str, code: int
) -> None:
    program = tmp_path / "program.py"
    program.write_text(TRAINING)
    env = {**os.environ, "MUSTER_RUNS": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1"}
    ended = programs.run(program, name, how, context, env=env)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert ", saved\n" in ended.stdout
    assert "was not saved" not in ended.stderr
    assert ("saved and continued" in ended.stdout) == (name == "SIGUSR1")


WORKERS = """
import multiprocessing, os, signal, sys, time
import muster

def wait(pipe, handles):
    if handles:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    pipe.send("ready")
    pipe.recv()  # for ever

def start(context, handles):
    mine, theirs = context.Pipe()
    worker = context.Process(target=wait, args=(theirs, handles))
    worker.start()
    assert mine.recv() == "ready"
    return worker, mine

if __name__ == "__main__":
    run = muster.session()
    for step in run.steps(1, run.state(x=0)):
        for name in ("fork", "spawn", "forkserver"):
            context = multiprocessing.get_context(name)
            for handles, code in ((False, -signal.SIGTERM), (True, 7)):
                worker, pipe = start(context, handles)
                os.kill(worker.pid, signal.SIGTERM)  # as a signal to all processes
                worker.terminate()
                worker.join()
                assert worker.exitcode == code, (name, worker.exitcode)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
    worker, pipe = start(multiprocessing.get_context("fork"), False)
    print("worker", worker.pid, flush=True)
    os.kill(worker.pid, signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_obeys_its_rank_and_does_not_outlive_it(tmp_path: Path) -> None:
    linux.adopt_orphans()
    ended = run_program(tmp_path, WORKERS)
    assert ended.returncode == -signal.SIGKILL, ended.stdout + ended.stderr
    worker = int(ended.stdout.split("worker ")[1])
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM


@pytest.mark.parametrize("number", linux.ASKING)
def test_no_request_to_save_ends_the_writer_even_while_it_imports(tmp_path: Path, number: signal.Signals) -> None:
    writer = WriterProcess()
    writer.process.send_signal(number)  # it has hardly begun
    order = SaveOrder(str(tmp_path), 3, 0, 0, 1, [], {"step": 3}, 10.0, 1, None)
    RunDir(tmp_path).attempt(0).make()
    memory = linux.memory_file("test", 4096)
    try:
        writer.order(order, memory)
        did: list[str] = []
        while "all" not in did:
            for message in writer.messages(wait_s=10.0):
                did.append(message["did"])
                writer.process.send_signal(number)
        assert did == ["shard", "commit", "all"]
    finally:
        writer.end()
        os.close(memory)


LOST_WRITER = """
import os, signal, muster
run = muster.session()
saver, orders = None, 0
for step in run.steps(10**6, run.state(x=0)):
    saver = saver or run._loop.saving
    if saver.writer and not orders:
        writer = saver.writer.process
        os.kill(writer.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGUSR1)
        orders = 1
    if orders == 1 and saver.flight and saver.flight.ordered:
        writer.kill()
        orders = 2
    if orders == 2 and list((run.folder / "checkpoints").glob("step-*/MANIFEST.json")):
        print("saved at last", flush=True)
        break
"""


def test_a_save_that_was_lost_with_its_writer_is_made_up_at_once(tmp_path: Path) -> None:
    ended = run_program(tmp_path, LOST_WRITER)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "was not saved (1 in a row): the writer process has ended" in ended.stderr
    assert "saved at last" in ended.stdout
