"""A forked process as its parent sees it: what it tells, how it ends, and where it stands when it says nothing more."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.node.leftovers import GONE, state_of
from muster.jobs.world.world import World
from support.live import wait_until

pytestmark = pytest.mark.ranks
REPOSITORY = Path(__file__).parents[2]


def stand_still() -> None:
    time.sleep(600)


def work(tell, page, how: str) -> None:
    if how == "done":
        tell({"enter": 3})
        page.beat()
        tell({"block": {"samples_us": [1.5] * 40_000}, "of": 3})  # more than a pipe holds
    elif how == "lost":
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242")
    elif how == "still":
        tell({"enter": 1})
        stand_still()
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        os.write(2, b"[W1121 17:00:00 socket.cpp:752] a warning of C++\nterminate called\n  what():  too short\n")
        os.abort() if how == "abort" else os._exit(7)


def heard_and_ended(world: World, how: str) -> dict[str, Any]:
    from muster.jobs.world.forked import Forked

    process, heard = Forked(lambda tell, page: work(tell, page, how)), []
    is_still = {"still": "S", "stop": "T"}.get(how)
    ended = process.followed(heard.append, lambda: state_of(process.pid) == is_still and _has_begun(how, heard), 0.02)
    return {"keys": [sorted(each) for each in heard], **vars(ended)}


def _has_begun(how: str, heard: list[Any]) -> bool:
    return how == "stop" or bool(heard)


WORDS = "last words: terminate called what(): too short"


@pytest.mark.parametrize(
    ("how", "ended"),
    [
        ("done", {"keys": [["enter"], ["block", "of"], ["done"]], "how": "done", "beats": 1}),
        ("abort", {"how": "died", "message": f"was killed by SIGABRT; {WORDS}", "lost": False}),
        ("exit", {"how": "died", "message": f"ended with code 7; {WORDS}", "lost": False}),
        ("lost", {"how": "raised", "lost": True}),
        ("stop", {"how": "silent", "stopped": True, "message": ""}),
    ],
)
def test_all_it_tells_arrives_in_order_and_how_it_ended_is_known(on_ranks, how, ended):
    (found,) = on_ranks(1, heard_and_ended, group=False, how=how)
    assert {name: found[name] for name in ended} == ended


def test_a_silent_one_is_killed_and_shows_where_it_stood(on_ranks):
    (found,) = on_ranks(1, heard_and_ended, group=False, how="still")
    assert (found["how"], found["stopped"]) == ("silent", False)
    assert found["message"].startswith("jobs/test_forked.py:")
    assert found["message"].endswith(" stand_still")


def test_it_dies_with_its_parent() -> None:
    code = """
import os, time
from muster.jobs.world.forked import Forked
print(Forked(lambda tell, page: time.sleep(600)).pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    wait_until(lambda: state_of(child) in (GONE, "Z"), "the child's end")
