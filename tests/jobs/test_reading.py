"""Bounded reading: whatever a file holds, reading it takes little memory, and ends with a record or one line."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.jobs.basics.errors import JobFileError, RunFolderError
from muster.jobs.basics.files import read_lines
from muster.jobs.basics.reading import (
    MOST_VALUES,
    SETTINGS_BYTES,
    UntrustedError,
    parse_json,
    read_bytes,
    read_end,
    target_of,
)
from muster.jobs.hosts.hosts import read_hostfile
from muster.jobs.spec import yamlfile
from support.memory import little_memory
from support.users import ATTACKER, needs_root

pytestmark = pytest.mark.slow


def test_a_log_of_1_gb_in_one_line_takes_little_memory_and_hides_no_record(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with path.open("wb") as file:
        file.write(b'{"event": "first"}\n')
        file.truncate(1 << 30)  # sparse: nothing but zeros
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"event": "last"}\n{"event": "torn')
    with little_memory():
        assert list(read_lines(path)) == [{"event": "first"}, {"event": "last"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested deeper than 64 levels"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested deeper than 64 levels"),
        ("9" * 5000, "a number of 5000 digits"),
        ("0." + "9" * 5000, "a number of 5002 digits"),
        ("[" + "0," * MOST_VALUES + "0]", "more than 1048576 values"),
        ("{", "Expecting property name"),
        ('"\ud800', "Unterminated string"),
    ],
)
def test_json_out_of_bounds_is_a_value_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_brackets_and_digits_inside_text_are_within_bounds() -> None:
    value = {"text": '"[' * 1000 + "\\" + "9" * 5000, "list": [[1.5, -2, 1e300]]}
    assert parse_json(json.dumps(value)) == value


def test_measured_numbers_have_a_bound_of_their_own() -> None:
    assert parse_json("[1e59, -7]", largest=1e60) == [1e59, -7]
    for text in ("1e61", "-1e61", "9" * 62, "1e999"):
        with pytest.raises(ValueError, match="is beyond 1e\\+60"):
            parse_json(text, largest=1e60)


def test_a_file_has_at_most_so_many_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    assert read_end(path, 3) == b"345"
    with pytest.raises(ValueError, match="file: has more than 4 bytes"):
        read_bytes(path, 4)


def test_the_users_own_file_may_be_a_link_or_a_pipe(tmp_path: Path) -> None:
    link, reading, writing = tmp_path / "link", *os.pipe()
    link.symlink_to("/dev/zero")
    os.write(writing, b"node0\n")
    os.close(writing)
    try:
        assert [host.name for host in read_hostfile(Path(f"/dev/fd/{reading}"))] == ["node0"]
    finally:
        os.close(reading)
    with little_memory(), pytest.raises(JobFileError, match=f"more than {SETTINGS_BYTES} bytes; expected a hosts file"):
        read_hostfile(link)


def test_a_hosts_file_of_spaces_is_read_in_no_time(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(" " * 500_000 + "node0  slots \t=  4" + " " * 500_000)
    begun = time.process_time()
    assert [(host.name, host.slots) for host in read_hostfile(path)] == [("node0", 4)]
    assert time.process_time() - begun < 5  # generous: it took an hour


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo, Path.mkdir])
def test_a_runs_file_is_no_link_pipe_or_folder(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = tmp_path / "events.jsonl"
    make(path)
    with pytest.raises(UntrustedError, match="it was not used"):
        list(read_lines(path))


def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="cannot be read: not a directory"):
        list(read_lines(tmp_path / "file" / "events.jsonl"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: " + "[" * 100_000, "f:2: not YAML: more than 64 levels (column 69)"),
        ("- " * 50_000, "f:1: not YAML: more than 64 levels (column 130)"),
        ("- a\n" * 100_000, "f:20001: not YAML: more than 20,000 values (column 1)"),
        (f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 5000)}]", "f:1: more than 20,000 values"),
    ],
    ids=["brackets", "dashes", "values", "an alias of long text"],
)
def test_yaml_out_of_bounds_is_one_line_with_its_place(text: str, message: str) -> None:
    with little_memory(), pytest.raises(JobFileError) as caught:
        yamlfile.parse(text, "f")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_link_of_ones_own_is_followed_by_its_target_and_a_strangers_is_not(tmp_path: Path) -> None:
    """A run's slurm-JOB.out is such a link in arrays, and under submitit."""
    own = tmp_path / "own"
    own.symlink_to("elsewhere/log")
    assert target_of(own) == tmp_path / "elsewhere" / "log"
    assert target_of(tmp_path / "gone") == tmp_path / "gone"
    (tmp_path / "file").touch()
    assert target_of(tmp_path / "file") == tmp_path / "file"


@needs_root
def test_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/etc/passwd")
    os.lchown(link, ATTACKER, ATTACKER)
    with pytest.raises(UntrustedError, match=f"belongs to user {ATTACKER}"):
        target_of(link)
