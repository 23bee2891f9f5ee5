"""The stacks of real gloo ranks that hang, each for a reason of its own, and who is named."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from muster.launch.node.dumping import Dumps
from muster.launch.supervision.stacks import Blamed, absent
from support.live import wait_until
from support.warm import Warm

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow]

RANKS = 3
JOB = """
import ctypes, os, signal, time
from datetime import timedelta
import torch
import torch.distributed as dist

RANK, CASE = int(os.environ["RANK"]), os.environ["CASE"]
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
store = dist.FileStore(os.environ["STORE"], 3)
dist.init_process_group("gloo", store=store, rank=RANK, world_size=3, timeout=timedelta(seconds=50))


def sum_up():
    dist.all_reduce(torch.ones(4))


def load():
    time.sleep(1000)


def compute():
    mutex = ctypes.create_string_buffer(64)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # for good, holding the interpreter's lock; signals do not end it


dist.barrier()
print("ready")
if RANK != 1:
    sum_up()
elif CASE == "sleeps":
    load()
elif CASE == "stands still":
    while True: os.kill(os.getpid(), signal.SIGSTOP)  # one line: whoever asks for its stack lets it go on for a moment
elif CASE == "holds the lock":
    compute()
elif CASE == "skips":
    dist.barrier()
"""


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """A rank parent whose ranks have torch."""
    made = Warm(tmp_path_factory.mktemp("warm"), 1, "torch,torch.distributed").wait_for_rank_parents()
    (made.folder / "job.py").write_text(JOB)
    yield made
    made.kill()


def line_of(text: str) -> int:
    """The last line of the job that reads so."""
    return max(number for number, line in enumerate(JOB.splitlines(), start=1) if line.strip().startswith(text))


def diagnose(warm: Warm) -> Blamed:
    """Ask the ranks for their stacks, as an agent does, and judge."""
    dumps = Dumps({rank: warm.err(rank) for rank in range(RANKS)})
    warm.tell({"do": "dump"})
    states = warm.next("dumped")["dumped"]
    lines = asyncio.run(dumps.gather(range(RANKS)))
    said: dict[int, dict[str, Any]] = {
        rank: {"state": states[str(rank)], "lines": lines[rank], "steps": 0} for rank in range(RANKS)
    }
    return absent(said)


CASES = [
    ("sleeps", "did not reach all_reduce (", "time.sleep", "load"),
    ("holds the lock", "did not reach all_reduce (", "ctypes.PyDLL", "compute"),
    ("skips", "waits in a different place than the others: it waits in barrier at ", "dist.barrier()", "<module>"),
    ("stands still", "is suspended by a signal: ", "while True: os.kill", "<module>"),
]


@pytest.mark.parametrize(("case", "why", "line", "function"), CASES)
def test_the_rank_that_did_not_come_is_named(case: str, why: str, line: str, function: str, warm: Warm) -> None:
    code = f"import runpy; runpy.run_path({str(warm.folder / 'job.py')!r})"
    for rank in range(RANKS):
        warm.out(rank).unlink(missing_ok=True)
    env = {"CASE": case, "STORE": str(warm.folder / f"store {case}")}
    warm.start(*(warm.rank(rank, code=code, env={**env, "RANK": str(rank)}) for rank in range(RANKS)))
    for rank in range(RANKS):
        warm.wait_for_output(rank)
    told = f"job.py:{line_of(line)} {function}"
    found: list[Blamed] = []

    def has_come_to_its_end() -> bool:
        # A rank that stops itself again may do so while another of its threads writes: what it wrote is then cut short.
        found.append(diagnose(warm))
        text = found[-1].text
        return found[-1].ranks == (1,) and why in text and told in text and text.count("rank ") == 1

    wait_until(has_come_to_its_end, f"{why!r} and {told!r}")
    warm.stop(*range(RANKS))
