"""How an agent waits for its rank parent's end: a frozen one is killed, and one that is only slow is not."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from muster.launch.node import rank_parent_link
from muster.launch.node.rank_parent_link import RankParentLink

pytestmark = [pytest.mark.command, pytest.mark.slow]

SLOW = """
import json, os, socket, sys, time
agent = socket.socket(fileno=int(sys.argv[1]))
agent.sendall((json.dumps({"ready": os.getpid()}) + "\\n").encode())
while agent.recv(1000):
    pass
for _ in range(40):  # it ends its ranks, slowly
    time.sleep(0.05)
"""
END_S = 0.5


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A rank parent that needs two seconds to end, where END_S is shorter, and the agent's socket to it."""
    monkeypatch.setattr(rank_parent_link, "END_S", END_S)
    ours, theirs = socket.socketpair()
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    yield process, ours
    process.kill()
    process.wait()
    ours.close()


@pytest.mark.parametrize(("freeze", "code"), [(False, 0), (True, -signal.SIGKILL)])
async def test_a_rank_parent_that_runs_is_waited_for_however_slow_it_is_and_a_frozen_one_is_killed(
    slow, freeze: bool, code: int
) -> None:
    process, ours = slow
    link = RankParentLink(ours)
    await link.open(preload="", env={})
    ready = await anext(link.messages())
    if freeze:
        os.kill(ready["ready"], signal.SIGSTOP)
    await link.close()
    assert process.wait() == code
