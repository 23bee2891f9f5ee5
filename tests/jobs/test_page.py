"""The page that a rank shares with its keeper, seen from both sides of a fork."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from muster.jobs.hosts import ranks
from muster.jobs.node import page
from muster.jobs.node.page import MOST, NEVER, Page, Phase


@pytest.fixture
def shared() -> Iterator[Page]:
    made = Page()
    yield made
    made.close()


def in_child(work) -> None:
    """Do something in a forked process, and wait for its end."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_new_page_says_that_nothing_has_happened_and_asks_for_nothing(shared: Page) -> None:
    assert (shared.phase, shared.steps, shared.beats, shared.slowest_s, shared.held) == (Phase.START, 0, 0, 0.0, NEVER)
    for each in (shared, page.own):  # that of a process without a keeper
        assert (each.hold, each.stop_at) == (False, NEVER)


def test_what_one_side_of_a_fork_writes_is_read_by_the_other(shared: Page) -> None:
    shared.hold = 1
    shared.stop_at = 7

    def rank() -> None:
        assert shared.hold
        assert shared.stop_at == 7
        shared.enter(Phase.RUN)
        shared.step_done(41, 0.25)
        shared.beat()
        shared.held = 41  # waiting is no progress: no beat

    in_child(rank)
    assert (shared.phase, shared.steps, shared.beats, shared.slowest_s, shared.held) == (Phase.RUN, 41, 3, 0.25, 41)


def test_a_rank_that_continues_has_the_steps_of_its_state(shared: Page) -> None:
    shared.step_done(41, 0.25)
    shared.hold, shared.stop_at = 1, 41
    shared.renew(None)  # it keeps its state
    assert (shared.steps, shared.hold, shared.stop_at) == (41, False, NEVER)
    shared.renew(40)  # it loads a checkpoint from the memory of the nodes
    assert shared.steps == 40


def test_every_progress_changes_the_beats(shared: Page) -> None:
    seen = [shared.beats]
    steps = (lambda: shared.enter(Phase.SAVE), shared.beat, lambda: shared.step_done(0, 0.0), shared.beat)
    for progress in steps:
        progress()
        seen.append(shared.beats)
    assert len(set(seen)) == len(seen)


def test_a_page_that_one_side_closes_stays_with_the_other(shared: Page) -> None:
    in_child(lambda: (setattr(shared, "stop_at", 9), shared.close()))
    assert shared.stop_at == 9


def test_nobody_sees_half_of_a_number(shared: Page) -> None:
    """Written byte by byte, as struct does with standard sizes, -1 became 5 by way of -251."""
    values = (NEVER, 0x0102030405060708)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, b".")
        while True:
            shared.stop_at = values[0]
            shared.stop_at = values[1]
    try:
        os.read(reading, 1)
        seen = {shared.stop_at for _ in range(300_000)}
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)
    assert seen <= set(values)


# Pages that programs inherit ------------------------------------------------------------------------------------------

ATTACHES = """
import os
from muster.jobs.hosts import ranks
from muster.jobs.node.page import Page, Phase
page = Page.attach(ranks.inherited(os.environ, ranks.PAGE))
page.open_session(os.getpid(), deaf=True)
page.enter(Phase.RUN)
print(page.hold, page.stop_at, os.get_inheritable(page.descriptor))
"""


@pytest.fixture
def inheritable() -> Iterator[Page]:
    made = Page.inheritable()
    yield made
    made.close()


def test_a_program_attaches_the_page_that_it_has_inherited(inheritable: Page) -> None:
    inheritable.hold = 1
    inheritable.stop_at = 7
    environ = {**os.environ, ranks.PAGE: ranks.descriptor_text(inheritable.descriptor)}
    assert inheritable.session == 0
    argv = [sys.executable, "-c", ATTACHES]
    program = subprocess.Popen(argv, env=environ, pass_fds=[inheritable.descriptor], stdout=subprocess.PIPE, text=True)
    assert program.communicate()[0] == "1 7 False\n"
    assert (inheritable.session, inheritable.deaf, inheritable.dumps) == (program.pid, True, False)
    assert inheritable.phase == Phase.RUN


def test_a_page_cannot_be_cut_short_by_the_program_that_has_it(inheritable: Page) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(inheritable.descriptor, 0)


def test_whatever_a_program_writes_into_its_page_is_within_bounds(inheritable: Page) -> None:
    for value in (-(1 << 63), (1 << 63) - 1):
        os.pwrite(inheritable.descriptor, value.to_bytes(8, sys.byteorder, signed=True) * 10, 0)
        assert inheritable.phase == Phase.START
        assert inheritable.session == 0
        assert 0 <= inheritable.steps <= MOST
        assert NEVER <= inheritable.held <= MOST
        assert 0.0 <= inheritable.slowest_s <= MOST
