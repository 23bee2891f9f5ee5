"""The follower against the whole file split at newlines, whatever the writes, reads and cuts between."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.jobs.basics.terminal import last_state
from muster.launch.common import follow
from muster.launch.common.follow import LineFollower, decoded, offset_of_last, tail_lines

pytestmark = pytest.mark.slow

TEXT = st.binary(max_size=60) | st.text(alphabet="aé\u2028😀\n", max_size=30).map(str.encode)


def reference(data: bytes) -> list[str]:
    """Return the lines of a file that is over, an unfinished last one with them."""
    return [decoded(line) for line in data.removesuffix(b"\n").split(b"\n")] if data else []


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@settings(deadline=None, max_examples=150)
@given(st.lists(TEXT, max_size=12), st.integers(1, 7))
def test_any_split_into_writes_gives_the_lines_of_the_whole(writes: list[bytes], chunk_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(follow, "CHUNK_BYTES", chunk_bytes)
        path = Path(folder) / "log"
        follower = LineFollower(path)
        lines: list[str] = []
        for data in writes:
            append(path, data)
            lines += map(decoded, follower.poll())
        whole = b"".join(writes)
        held = list(map(decoded, follower.flush()))
        assert lines == reference(whole[: whole.rfind(b"\n") + 1])
        assert lines + held == reference(whole)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.lists(TEXT, max_size=5), min_size=1, max_size=5), st.booleans())
def test_any_split_with_cuts_between_gives_the_lines_of_every_life_of_the_file(
    lives: list[list[bytes]], replaced: bool
) -> None:
    # Each life begins with its own number: two lives with the same bytes cannot be told apart, by nobody.
    lives = [[f"<{number}>".encode(), *writes] for number, writes in enumerate(lives)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        restarts: list[Path] = []
        follower = LineFollower(path, on_restart=restarts.append)
        lines: list[str] = []
        for writes in lives:
            if replaced:
                path.rename(path.with_name("old")) if path.exists() else None
            else:
                path.write_bytes(b"")
            for data in writes:
                append(path, data)
                lines += map(decoded, follower.poll())
        lines += map(decoded, follower.flush())
        assert lines == [line for writes in lives for line in reference(b"".join(writes))]
        assert len(restarts) == len(lives) - 1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def follower(path: Path) -> LineFollower:
    return LineFollower(path)


def test_a_missing_file_has_no_lines_and_may_come_later(path: Path, follower: LineFollower) -> None:
    assert [*map(decoded, follower.poll())] == []
    append(path, b"hello\n")
    assert [*map(decoded, follower.poll())] == ["hello"]


def test_a_file_cut_and_grown_past_the_old_end_is_read_from_its_start(path: Path, follower: LineFollower) -> None:
    append(path, b"one\ntwo\n")
    assert [*map(decoded, follower.poll())] == ["one", "two"]
    path.write_bytes(b"three\nfour\nfive\n")
    assert [*map(decoded, follower.poll())] == ["three", "four", "five"]


def test_an_unfinished_line_is_given_out_when_the_file_is_cut(path: Path, follower: LineFollower) -> None:
    append(path, b"one\ntw")
    assert [*map(decoded, follower.poll())] == ["one"]
    path.write_bytes(b"")
    assert [*map(decoded, follower.poll())] == ["tw"]


def test_a_torn_character_is_whole_when_its_rest_comes(path: Path, follower: LineFollower) -> None:
    whole = "grüße 😀\n".encode()
    lines: list[str] = []
    for index in range(len(whole)):
        append(path, whole[index : index + 1])
        lines += map(decoded, follower.poll())
    assert lines == ["grüße 😀"]


def test_a_very_long_line_comes_in_pieces_cut_between_characters(path: Path) -> None:
    text = "é😀a" * 40
    path.write_text(text + "\nend\n", encoding="utf-8")
    lines = [*map(decoded, LineFollower(path, longest_bytes=16).poll())]
    assert lines[-1] == "end"
    assert "".join(lines[:-1]) == text
    assert max(len(line.encode()) for line in lines) <= 16


def test_what_is_held_stays_bounded_without_any_newline(path: Path, follower: LineFollower) -> None:
    path.write_bytes(b"x" * 5_000_000)
    got = [len(line) for line in follower.poll()]
    held = [len(line) for line in follower.flush()]
    assert max(got + held) <= follow.LONGEST_LINE_BYTES
    assert sum(got + held) == 5_000_000


@settings(deadline=None, max_examples=150)
@given(TEXT, st.integers(0, 6), st.integers(1, 9))
def test_the_last_lines_are_those_of_the_whole_file(data: bytes, count: int, chunk_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes(data)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(follow, "CHUNK_BYTES", chunk_bytes)
            offset = offset_of_last(path, count)
        expected = reference(data)[-count:] if count else []
        assert reference(data[offset:]) == expected
        assert tail_lines(path, count) == [last_state(line) for line in expected]


def test_the_last_lines_of_a_missing_or_empty_file_are_none(path: Path) -> None:
    assert tail_lines(path, 3) == []
    path.touch()
    assert tail_lines(path, 3) == []


@pytest.mark.parametrize(
    ("line", "shown"),
    [("plain", "plain"), ("10%\r50%\r99%", "99%"), ("10%\r", "10%"), ("windows\r", "windows"), ("\0\0hole", "hole")],
)
def test_a_redrawn_line_is_shown_in_its_last_state(line: str, shown: str) -> None:
    assert last_state(line) == shown
