"""A run's sign of life: written now and then, read by those who see the folder and not the host."""

import json
import os
import socket
import time
from pathlib import Path

import pytest

from jobs.errors import RunFolderError
from jobs.rundir import RunDir
from launch.supervision import lease
from launch.supervision.lease import Lease, age_s


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


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


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
    assert age is not None
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
    seen = []
    held = Lease(run)
    held.renew()
    replace = Path.replace

    def look_then_replace(self: Path, target: Path) -> Path:
        seen.append(age_s(run))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", look_then_replace)
    clock.now += 2.0
    held.renew()
    assert seen == [2.0]
    assert age_s(run) == 0.0


def test_a_folder_that_has_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError):
        Lease(RunDir(tmp_path / "gone")).renew()
