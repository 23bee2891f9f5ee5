"""One process at a time may resume a run."""

import json
import os
import socket
import threading
import time
from typing import Any

import pytest

from muster.jobs.basics.errors import RefusedError, RunFolderError
from muster.jobs.basics.files import write_json
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import processes
from muster.launch.records.lease import DEAD_S
from muster.launch.submit.claim import claim, claimed, is_free, newest

HERE = socket.gethostname()


def of(pid: int, ticks: int | None, host: str = HERE, age_s: float = 0.0) -> dict[str, Any]:
    return {"host": host, "pid": pid, "pid_start": ticks, "time": time.time() - age_s}


def leave(run: RunDir, left: dict[str, Any]) -> None:
    """Leave a claim behind, as a process that was killed does."""
    run.claims.mkdir()
    write_json(claim(run, 1), left)


def test_a_claim_lasts_as_long_as_its_block(run: RunDir) -> None:
    with claimed(run):
        assert not is_free(json.loads(claim(run, 1).read_text()), time.time())
    assert is_free(json.loads(claim(run, 1).read_text()), time.time())
    with claimed(run):
        assert newest(run) == 2
    assert sorted(run.claims.iterdir()) == [claim(run, 1), claim(run, 2)]


def test_a_second_one_is_refused_and_the_first_keeps_it(run: RunDir) -> None:
    with claimed(run):
        with pytest.raises(RefusedError, match=f"is being resumed already, by pid {os.getpid()} on {HERE}"):
            claimed(run).__enter__()
        assert newest(run) == 1


def test_the_claim_of_a_process_that_is_gone_is_free() -> None:
    now, own = time.time(), os.getpid()
    assert not is_free(of(own, processes.start_ticks(own)), now)
    assert is_free(of(own, 1), now)  # its pid is another process's now
    assert not is_free(of(1, 1, host="elsewhere"), now)
    assert is_free(of(1, 1, host="elsewhere", age_s=DEAD_S + 1), now)
    assert is_free({}, now)


def test_the_claim_of_one_that_was_killed_is_followed_by_the_next(run: RunDir) -> None:
    leave(run, of(os.getpid(), 1))
    with claimed(run):
        assert newest(run) == 2


def test_a_folder_that_cannot_be_written_is_said(run: RunDir) -> None:
    run.claims.write_text("a file")
    with pytest.raises(RunFolderError, match="cannot write here"):
        claimed(run).__enter__()


def test_of_many_at_once_one_wins(run: RunDir) -> None:
    leave(run, of(os.getpid(), 1))
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
