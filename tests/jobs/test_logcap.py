"""A log that is capped while its rank writes, and the reader that follows it: real files, real holes."""

import errno
from pathlib import Path

import pytest

from muster.jobs.basics import ownership
from muster.jobs.node import logcap
from muster.launch.common.follow import LineFollower, offset_of_last, tail_lines

BLOCK = logcap.BLOCK_BYTES
PARTS = {"first": 2 * BLOCK, "last": 3 * BLOCK, "step": BLOCK}
MARK = "bytes of this log are left out here]"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank-00000.out"


def write(log: Path, begin: int, end: int) -> None:
    """Append numbered lines of 64 bytes."""
    with log.open("a") as file:
        file.writelines(f"{number:063}\n" for number in range(begin, end))


def on_disk(log: Path) -> int:
    return log.stat().st_blocks * logcap.SECTOR_BYTES


def test_a_log_keeps_its_first_and_last_part_and_says_how_much_is_missing(log: Path) -> None:
    for part in range(8):
        write(log, part * 4096, (part + 1) * 4096)  # 4 blocks each
        logcap.cap(log, **PARTS)
    size = 8 * 4096 * 64
    assert log.stat().st_size == size
    assert on_disk(log) <= sum(PARTS.values())
    lines = [line.decode() for line in LineFollower(log).poll()]
    (mark,) = [number for number, line in enumerate(lines) if line.endswith(MARK)]
    assert lines[mark] == f"[muster: {size - 5 * BLOCK:>16,} {MARK}"
    kept = [int(line) for line in (*lines[: mark - 1], *lines[mark + 1 :])]
    assert kept == [*range(2047), *range(size // 64 - 3 * 1024, size // 64)]
    assert "\0" not in "".join(lines)
    assert tail_lines(log, 1) == [f"{size // 64 - 1:063}"]
    assert offset_of_last(log, 2) == size - 128


def test_who_follows_it_misses_nothing_and_sees_nothing_twice(log: Path) -> None:
    cuts: list[Path] = []
    follower = LineFollower(log, on_restart=cuts.append)
    seen: list[bytes] = []
    for part in range(8):
        write(log, part * 4096, (part + 1) * 4096)
        seen += follower.poll()
        logcap.cap(log, **PARTS)
    assert [int(line) for line in seen] == list(range(8 * 4096))
    assert cuts == []


def test_who_was_slower_than_the_cap_goes_on_behind_the_hole(log: Path) -> None:
    cuts: list[Path] = []
    follower = LineFollower(log, on_restart=cuts.append)
    write(log, 0, 4096)
    seen = list(follower.poll())
    write(log, 4096, 8 * 4096)
    logcap.cap(log, **PARTS)
    seen += follower.poll()
    assert [int(line) for line in seen] == [*range(4096), *range(8 * 4096 - 3 * 1024, 8 * 4096)]
    assert cuts == []


def test_a_small_log_a_missing_one_and_a_link_are_left_alone(log: Path, tmp_path: Path) -> None:
    logcap.cap(log)
    write(log, 0, 5 * 1024)
    logcap.cap(log, **PARTS)
    assert len(list(LineFollower(log).poll())) == 5 * 1024
    write(log, 0, 5 * 1024)
    (link := tmp_path / "link").symlink_to(log)
    logcap.cap(link, **PARTS)
    assert on_disk(log) >= 10 * BLOCK


def test_a_file_system_that_cannot_is_told_of_once(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cannot(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(logcap, "fallocate", cannot)
    monkeypatch.setattr(ownership, "_warned", set())
    write(log, 0, 8 * 1024)
    logcap.cap(log, **PARTS)
    logcap.cap(log, **PARTS)
    said = f"{log.parent}: logs here cannot be capped, and may fill the disk: Operation not supported"
    assert capsys.readouterr().err == f"muster: warning: {said}\n"
