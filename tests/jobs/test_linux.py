"""The kernel's part in keeping a tree of processes together, on trees that each test grows."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from muster.jobs.machine import linux
from muster.launch.common.processes import start_ticks
from support.live import wait_until

ROOT = str(Path(linux.__file__).parents[1])

# Every process of a tree says its name and pid on one shared pipe, then sleeps. In a chain "ab" is below "a".
TREE = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from muster.jobs.machine import linux

def say(name):
    os.write(1, f"{name} {os.getpid()}\\n".encode())
"""


class Tree:
    """A process and all that it makes; killed with the test."""

    def __init__(self, body: str, count: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TREE + body, ROOT],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        said = [self.process.stdout.readline().split() for _ in range(count)]
        self.pids = {name: int(pid) for name, pid in said}

    def close(self) -> None:
        for pid in [*self.pids.values(), self.process.pid]:
            linux.kill_quietly(pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def grow() -> Iterator[Callable[[str, int], Tree]]:
    """Return a function that runs a body which says `count` names."""
    trees: list[Tree] = []

    def start(body: str, count: int) -> Tree:
        trees.append(Tree(body, count))
        return trees[-1]

    yield start
    for tree in trees:
        tree.close()


CHAIN = """
for name in ("a", "ab", "abc"):
    if os.fork():
        break
    say(name)
time.sleep(50)
"""


def test_descendants_are_all_below_and_nobody_else(grow) -> None:
    tree, other = grow(CHAIN, 3), grow(CHAIN, 3)
    assert linux.descendants(tree.process.pid) == [tree.pids[name] for name in ("a", "ab", "abc")]
    assert linux.descendants(tree.pids["ab"]) == [tree.pids["abc"]]
    assert linux.descendants(tree.pids["abc"]) == []
    assert {*tree.pids.values(), *other.pids.values()} <= set(linux.descendants(os.getpid()))


def test_a_tree_can_be_left_out(grow) -> None:
    tree, other = grow(CHAIN, 3), grow(CHAIN, 3)
    found = linux.descendants(os.getpid(), leave=[tree.pids["ab"], other.process.pid])
    assert tree.pids["a"] in found
    assert not {tree.pids["ab"], tree.pids["abc"], other.process.pid, *other.pids.values()} & set(found)


CHILDREN = {  # of which the tree has just one that counts, named last
    "a new session and ignored signals do not hide it": """
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    say("a")
time.sleep(50)
""",
    "a name that is meant to confuse confuses nobody": r"""
if os.fork() == 0:
    open("/proc/self/comm", "wb").write(b"a) Z \xff 1\n(")
    say("a")
time.sleep(50)
""",
    "orphans become the children of the one that adopts them": """
root = os.getpid()
linux.adopt_orphans()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while os.getppid() != root: time.sleep(0.01)
        say("a")
        time.sleep(50)
    os._exit(0)
time.sleep(50)
""",
}


@pytest.mark.parametrize("name", CHILDREN)
def test_a_child_is_found_whatever_it_does(grow, name: str) -> None:
    tree = grow(CHILDREN[name], 1)
    assert linux.descendants(tree.process.pid) == [tree.pids["a"]]


def test_zombies_do_not_count_but_what_is_below_their_heirs_does(grow) -> None:
    body = """
linux.adopt_orphans()
if os.fork() == 0:
    say("a")
    if os.fork() == 0:
        say("ab")
        time.sleep(50)
    os._exit(0)
os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # a is dead now, and stays a zombie
say("root")
time.sleep(50)
"""
    tree = grow(body, 3)
    assert linux.descendants(tree.process.pid) == [tree.pids["ab"]]
    os.kill(tree.pids["a"], 0)  # the zombie is still there


def test_a_main_thread_that_ended_before_the_others_is_no_zombie(grow) -> None:
    body = """
import ctypes, threading
if os.fork() == 0:
    threading.Thread(target=time.sleep, args=(50,)).start()
    say("a")
    ctypes.CDLL(None).pthread_exit(None)
time.sleep(50)
"""
    tree = grow(body, 1)
    stat = Path(f"/proc/{tree.pids['a']}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "the end of the main thread")
    assert linux.descendants(tree.process.pid) == [tree.pids["a"]]


def test_a_child_dies_with_its_parent_however_the_parent_dies(grow) -> None:
    body = """
parent = os.getpid()
if os.fork() == 0:
    linux.die_with_parent(parent)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    say("a")
time.sleep(50)
"""
    tree = grow(body, 1)
    os.kill(tree.process.pid, signal.SIGKILL)
    tree.process.wait()
    wait_until(lambda: start_ticks(tree.pids["a"]) is None, "the end of the child")


def test_a_child_whose_parent_is_dead_already_ends_at_once(grow) -> None:
    tree = grow("say('a'); linux.die_with_parent(os.getppid() + 1)", 1)
    assert tree.process.wait(timeout=20) == 128 + signal.SIGKILL


def test_signalling_what_is_gone_is_no_error_and_what_is_there_is_signalled() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(50)"], start_new_session=True) as child:
        linux.kill_quietly(child.pid, signal.SIGKILL, group=True)
        assert child.wait() == -signal.SIGKILL
    linux.kill_quietly(child.pid, signal.SIGKILL)
    linux.kill_quietly(child.pid, signal.SIGKILL, group=True)
