"""A player as its conductor sees it: what it tells, how it ends, and where it stands when it says nothing more."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muster.jobs.node.leftovers import state_of
from muster.jobs.world.world import World
from support.live import wait_until

pytestmark = pytest.mark.ranks
REPOSITORY = Path(__file__).parents[3]


def told_and_ended(world: World) -> dict:
    from muster.collectives_bench.ranks.forked import Player

    def play(tell, page) -> None:
        tell({"enter": 3})
        page.beat()
        tell({"block": {"samples_us": [1.5] * 40_000}, "of": 3})  # more than a pipe holds

    player, messages = Player(play), []
    while (told := player.told(5.0)) is not None:
        messages += told
    ending = player.end(0, silent=False)
    return {"keys": [sorted(each) for each in messages], "how": ending.how, "cell": ending.cell, "beats": ending.beats}


def test_what_a_player_tells_arrives_whole_and_in_order(on_ranks):
    (found,) = on_ranks(1, told_and_ended, group=False)
    assert found == {"keys": [["enter"], ["block", "of"], ["done"]], "how": "done", "cell": 3, "beats": 1}


def last_words(world: World, how: str) -> list:
    from muster.collectives_bench.ranks.forked import Player

    def play(tell, page) -> None:
        os.write(2, b"[W1121 17:00:00 socket.cpp:752] a warning of C++\nterminate called\n  what():  too short\n")
        os.abort() if how == "abort" else os._exit(7)

    player = Player(play)
    while player.told(5.0) is not None:
        pass
    ending = player.end(4, silent=False)
    return [ending.rank, ending.how, ending.message, ending.is_cause]


def test_a_player_that_dies_leaves_its_last_words(on_ranks):
    words = "last words: terminate called what(): too short"
    assert on_ranks(1, last_words, group=False, how="abort") == [[4, "died", f"was killed by SIGABRT; {words}", True]]
    assert on_ranks(1, last_words, group=False, how="exit") == [[4, "died", f"ended with code 7; {words}", True]]


def lost(world: World) -> list:
    from muster.collectives_bench.ranks.forked import Player

    def play(tell, page) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242")

    player = Player(play)
    while player.told(5.0) is not None:
        pass
    ending = player.end(0, silent=False)
    return [ending.how, ending.lost, ending.is_cause]


def test_a_player_that_lost_another_is_no_culprit(on_ranks):
    assert on_ranks(1, lost, group=False) == [["raised", True, False]]


def silent(world: World, stopped: bool) -> dict:
    from muster.collectives_bench.ranks.forked import Player

    def stand_still() -> None:
        time.sleep(600)

    def play(tell, page) -> None:
        tell({"enter": 1})
        if stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        stand_still()

    player = Player(play)
    while not player.told(5.0):
        pass
    wait_until(lambda: state_of(player.pid) == ("T" if stopped else "S"), "the standstill")
    ending = player.end(0, silent=True)
    return {"how": ending.how, "stopped": ending.stopped, "where": ending.message}


def test_a_silent_player_is_killed_and_shows_where_it_stood(on_ranks):
    (found,) = on_ranks(1, silent, group=False, stopped=False)
    assert (found["how"], found["stopped"]) == ("silent", False)
    assert found["where"].startswith("ranks/test_forked.py:")
    assert found["where"].endswith(" stand_still")
    (found,) = on_ranks(1, silent, group=False, stopped=True)
    assert found == {"how": "silent", "stopped": True, "where": ""}


def test_a_player_dies_with_its_conductor() -> None:
    code = """
import os, time
from muster.collectives_bench.ranks.forked import Player
print(Player(lambda tell, page: time.sleep(600)).pid, flush=True)
time.sleep(600)
"""
    conductor = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.PIPE
    )
    assert conductor.stdout is not None
    player = int(conductor.stdout.readline())
    conductor.kill()
    conductor.communicate()
    wait_until(lambda: not Path(f"/proc/{player}/exe").exists() or _is_dead(player), "the player's end")


def _is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
