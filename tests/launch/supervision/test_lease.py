"""A run's sign of life: written now and then, read by those who see the folder and not the host."""

import json
import os
import resource
import socket
import time
from pathlib import Path

import pytest

from muster.jobs.basics.errors import RunFolderError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.records import lease
from muster.launch.records.lease import Lease, age_s


class Clock:
    """Both clocks of `time`, moved by hand."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1.7e9 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(lease, "time", made)
    return made


def test_it_says_who_and_when(run: RunDir) -> None:
    began = time.time()
    Lease(run).renew()
    written = json.loads(run.lease.read_text())
    assert (written["host"], written["pid"]) == (socket.gethostname(), os.getpid())
    assert began <= written["time"] <= time.time()


def test_it_is_renewed_every_two_seconds_however_often_it_is_asked_to(run: RunDir, clock: Clock) -> None:
    held = Lease(run)
    times = set()
    for _ in range(41):
        held.renew()
        times.add(json.loads(run.lease.read_text())["time"])
        clock.now += 0.25
    assert sorted(times) == [1.7e9 + 1_000.0 + after_s for after_s in (0.0, 2.0, 4.0, 6.0, 8.0, 10.0)]


def test_its_age_is_what_has_passed_since(run: RunDir, clock: Clock) -> None:
    Lease(run).renew()
    assert age_s(run) == 0.0
    clock.now += 31.0
    age = age_s(run)
    assert age == pytest.approx(31.0)
    assert age > lease.STALE_S


def test_given_up_it_is_gone_also_twice(run: RunDir) -> None:
    held = Lease(run)
    held.renew()
    for _ in range(2):
        held.give_up()
        assert age_s(run) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", "{}", '{"time": null}', '{"time": "soon"}', '{"tim'])
def test_what_cannot_be_read_has_no_age(run: RunDir, text: str) -> None:
    """Nothing in a run folder is trusted."""
    run.lease.write_text(text)
    assert age_s(run) is None
    run.lease.write_bytes(b"\xff\xfe")
    assert age_s(run) is None


def test_a_reader_never_sees_half_of_it(run: RunDir, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """One write over all of the one before, in the same file, which is never shorter in between."""
    held = Lease(run)
    held.renew()
    before, written = run.lease.stat(), []
    monkeypatch.setattr(os, "pwrite", lambda _, data, offset: written.append((len(data), offset)))
    monkeypatch.setattr(os, "ftruncate", None)
    monkeypatch.setattr(os, "replace", None)
    clock.now += 2.0
    held.renew()
    assert written == [(before.st_size, 0)]
    assert (run.lease.stat().st_ino, run.lease.stat().st_size) == (before.st_ino, before.st_size)
    assert age_s(run) == 2.0


def test_one_that_cannot_open_anything_more_still_shows_that_it_lives(run: RunDir, clock: Clock) -> None:
    held = Lease(run)
    held.renew()
    clock.now += 2.0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            run.lease.read_text()
        held.renew()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert age_s(run) == 0.0


def test_a_link_in_its_place_is_not_followed(run: RunDir, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    run.lease.symlink_to(other)
    with pytest.raises(RunFolderError):
        Lease(run).renew()
    assert other.read_text() == "mine"


def test_a_folder_that_has_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError):
        Lease(RunDir(tmp_path / "gone")).renew()
