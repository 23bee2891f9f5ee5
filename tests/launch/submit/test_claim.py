"""One process at a time may resume a run."""

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import RefusedError
from jobs.files import write_json
from jobs.rundir import RunDir
from launch import processes
from launch.submit.claim import claimed, is_stale
from launch.supervision.lease import DEAD_S

HERE = socket.gethostname()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def of(pid: int, ticks: int | None, host: str = HERE, age_s: float = 0.0) -> dict[str, Any]:
    return {"host": host, "pid": pid, "pid_start": ticks, "time": time.time() - age_s}


def test_a_claim_lasts_as_long_as_its_block_and_leaves_nothing(run: RunDir) -> None:
    with claimed(run):
        assert run.claim.exists()
    assert list(run.path.iterdir()) == []


def test_a_second_one_is_refused_and_the_first_keeps_it(run: RunDir) -> None:
    with claimed(run):
        with pytest.raises(RefusedError, match=f"is being resumed already, by pid {os.getpid()} on {HERE}"):
            claimed(run).__enter__()
        assert run.claim.exists()


def test_the_claim_of_a_process_that_is_gone_is_stale() -> None:
    now, own = time.time(), os.getpid()
    assert not is_stale(of(own, processes.start_ticks(own)), now)
    assert is_stale(of(own, 1), now)  # its pid is another process's now
    assert not is_stale(of(1, 1, host="elsewhere"), now)
    assert is_stale(of(1, 1, host="elsewhere", age_s=DEAD_S + 1), now)
    assert is_stale({}, now)


def test_a_stale_claim_is_taken_over(run: RunDir) -> None:
    write_json(run.claim, of(os.getpid(), 1))
    with claimed(run):
        assert '"pid_start": 1}' not in run.claim.read_text()
    assert list(run.path.iterdir()) == []


def test_of_many_at_once_one_wins(run: RunDir) -> None:
    write_json(run.claim, of(os.getpid(), 1))
    start, done = threading.Barrier(8), threading.Barrier(8)
    won: list[int] = []
    refused: list[int] = []

    def one(number: int) -> None:
        start.wait()
        try:
            with claimed(run):
                won.append(number)
                done.wait()
        except RefusedError:
            refused.append(number)
            done.wait()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (len(won), len(refused)) == (1, 7)
