"""Run folders that a node cannot see: how it finds out, and how its files come home."""

import errno
import os
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.jobs.basics.errors import RunFolderError, StorageError, UnreachableError
from muster.jobs.basics.files import append_line, write_json, write_text
from muster.jobs.node import logcap
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import storage
from muster.launch.common.storage import Courier, find, keep


def made(path: Path, attempt: int = 0) -> RunDir:
    """Make a run folder with an attempt."""
    path.mkdir(parents=True)
    run = RunDir(path)
    run.attempt(attempt).path.mkdir()
    return run


@pytest.fixture(autouse=True)
def _nothing_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.jobs.basics.ownership._warned", set())


@pytest.fixture
def away(tmp_path: Path) -> RunDir:
    """The run folder as a node has it, on its own disk."""
    return made(tmp_path / "node" / "run-1")


@pytest.fixture
def home(tmp_path: Path) -> RunDir:
    """The run folder as the supervisor has it."""
    return made(tmp_path / "supervisor" / "run-1")


# Finding out ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, an own one."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_a_node_that_reads_the_nonce_shares_the_folder(home: RunDir) -> None:
    write_text(home.nonce("supervisor"), "abc")
    assert find(home, "abc") == {"storage": "shared", "run": str(home.path), "storage_why": ""}


@pytest.mark.parametrize("nonce", [None, "", "another run's"])
def test_a_folder_of_the_same_name_with_another_nonce_is_the_nodes_own(away: RunDir, nonce: str | None) -> None:
    if nonce is not None:
        write_text(away.nonce("supervisor"), nonce)
    assert find(away, "abc") == {"storage": "apart", "run": str(away.path), "storage_why": ""}


def test_a_node_without_the_folder_makes_one_that_only_this_user_can_look_into(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "not" / "there" / "run-1")
    assert find(run, "abc")["storage"] == "apart"
    assert run.path.stat().st_mode & 0o777 == 0o700


def test_where_the_path_cannot_be_made_the_temporary_folder_is_used(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "file").touch()
    run = RunDir(tmp_path / "file" / "run-1")
    expected = temporary / f"muster-{os.getuid()}" / "run-1"
    assert find(run, "abc") == {"storage": "apart", "run": str(expected), "storage_why": ""}
    assert expected.is_dir()


def test_a_node_with_nowhere_to_write_says_why(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "file").touch()
    temporary.rmdir()
    temporary.touch()
    found = find(RunDir(tmp_path / "file" / "run-1"), "abc")
    assert (found["storage"], found["run"]) == ("none", "")
    assert found["storage_why"].startswith(f"{tmp_path}/file/run-1: cannot write here: Not a directory")


def test_a_folder_that_is_seen_but_cannot_be_written_is_said(home: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on storage that is exported read-only; the kernel's answer is played, for it lets root write anywhere."""
    write_text(home.nonce("supervisor"), "abc")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert find(home, "abc") == {
        "storage": "none",
        "run": "",
        "storage_why": f"{home.path}: cannot be written by this user",
    }


# Bringing home --------------------------------------------------------------------------------------------------------


def take(home: RunDir, piece: tuple[str, int, bytes]) -> None:
    """Keep a piece as the supervisor does, of a node with ranks 0 to 3."""
    keep(home, storage.files_of(home, home.attempt(0), 0, range(4)), piece)


def deliver(courier: Courier, home: RunDir) -> int:
    """Carry all news; return the number of messages."""
    messages = list(courier.news())
    for message in messages:
        take(home, message)
    return len(messages)


def courier_of(away: RunDir, ranks: tuple[int, ...] = (0, 1), node: int = 0) -> Courier:
    return Courier(away, away.attempt(0), node, ranks)


def files(run: RunDir) -> dict[str, bytes]:
    return {str(path.relative_to(run.path)): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_every_file_of_a_node_comes_home_and_no_other(away: RunDir, home: RunDir) -> None:
    attempt = away.attempt(0)
    write_json(attempt.node(0), {"host": "n0"})
    attempt.setup(0).write_text("module load x\n")
    for rank in (0, 1):
        attempt.out(rank).write_text(f"out of {rank}\n")
        attempt.err(rank).write_bytes(b"\xff\x00 err")
        append_line(attempt.metrics(rank), {"step": rank})
    append_line(away.metrics, {"step": 1})
    expected = files(away)
    attempt.out(7).write_text("of another node\n")
    (attempt.path / "core").write_text("of the user's program\n")
    (away.path / "token").write_text("secret\n")
    deliver(courier_of(away), home)
    assert files(home) == expected
    assert len(expected) == 9


def test_metrics_of_the_run_come_from_the_node_of_rank_0_alone(away: RunDir, home: RunDir) -> None:
    append_line(away.metrics, {"step": 1})
    deliver(courier_of(away, ranks=(2, 3), node=1), home)
    assert files(home) == {}


def test_only_what_is_new_is_sent(away: RunDir, home: RunDir) -> None:
    courier = courier_of(away)
    assert deliver(courier, home) == 0
    out = away.attempt(0).out(0)
    out.write_text("one\n")
    assert deliver(courier, home) == 1
    assert deliver(courier, home) == 0
    with out.open("a") as file:
        file.write("two\n")
    (message,) = courier.news()
    assert message == ("attempt-000/rank-00000.out", 4, b"two\n")
    take(home, message)
    assert home.attempt(0).out(0).read_text() == "one\ntwo\n"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(st.tuples(st.sampled_from(["out", "err", "metrics"]), st.binary(max_size=40), st.booleans())),
    chunk_bytes=st.integers(1, 16),
)
def test_every_byte_arrives_once_and_in_order_whatever_the_pieces(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[str, bytes, bool]], chunk_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("storage")
    away, home = made(folder / "away"), made(folder / "home")
    attempt = away.attempt(0)
    paths = {"out": attempt.out(1), "err": attempt.err(1), "metrics": attempt.metrics(1)}
    courier = courier_of(away)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "CHUNK_BYTES", chunk_bytes)
        for name, data, look in pieces:
            with paths[name].open("ab") as file:
                file.write(data)
            if look:
                deliver(courier, home)
        deliver(courier, home)
    assert files(home) == {name: data for name, data in files(away).items() if data}


def test_a_large_file_comes_in_pieces_that_a_message_can_hold(away: RunDir, home: RunDir) -> None:
    data = os.urandom(3 * storage.CHUNK_BYTES + 5)
    away.attempt(0).out(0).write_bytes(data)
    messages = list(courier_of(away).news())
    assert [offset for _, offset, _ in messages] == [number * storage.CHUNK_BYTES for number in range(4)]
    for message in messages:
        take(home, message)
    assert home.attempt(0).out(0).read_bytes() == data


def test_a_piece_that_comes_twice_is_no_harm(away: RunDir, home: RunDir) -> None:
    away.attempt(0).out(0).write_bytes(b"0123456789")
    (message,) = courier_of(away).news()
    take(home, message)
    take(home, message)
    assert home.attempt(0).out(0).read_bytes() == b"0123456789"


# What a node must not write -------------------------------------------------------------------------------------------


def piece(name: str, data: bytes = b"hello", offset: int = 0) -> tuple[str, int, bytes]:
    return name, offset, data


@pytest.mark.parametrize(
    "name",
    [
        "events.jsonl",  # the supervisor's
        "attempts.jsonl",
        "job.yaml",
        "submission.json",
        "token",
        "stop.json",
        "attempt-000/placement.json",
        "attempt-000/commands/node-00.json",
        "attempt-000/../events.jsonl",
        "../metrics.jsonl",
        "/etc/passwd",
        "attempt-000//rank-00000.out",
        "./metrics.jsonl",
        "metrics.jsonl\n",
        "attempt-000/rank-00000.out\n",
        "attempt-000/rank-00000.out.bak",
        "attempt-000/rank-0.out",
        "attempt-000/rank-00004.out",  # of another node
        "attempt-001/rank-00000.out",  # of another attempt
        "xmetrics.jsonl",
        "metrics_jsonl",
        "code/jobs/exits.py",
        "",
        ".",
    ],
)
def test_a_name_that_is_not_a_nodes_to_write_is_refused(home: RunDir, name: str) -> None:
    with pytest.raises(UnreachableError, match="its agent sent a file that is not its own"):
        take(home, piece(name))
    assert files(home) == {}


@pytest.mark.parametrize("offset", [6, 2**40, -1])
def test_no_piece_begins_beyond_the_end_of_a_file(home: RunDir, offset: int) -> None:
    name = "attempt-000/rank-00000.out"
    take(home, piece(name))
    with pytest.raises(UnreachableError, match=f"its agent sent {name} from byte {offset}, and the file has 5 bytes"):
        take(home, piece(name, offset=offset))
    assert home.attempt(0).out(0).read_bytes() == b"hello"


@pytest.mark.parametrize(("folder", "mode"), [(0o700, 0o600), (0o755, 0o640), (0o750, 0o640)])
def test_what_comes_home_is_read_by_the_group_if_the_folder_is_and_by_nobody_else(
    home: RunDir, folder: int, mode: int
) -> None:
    home.attempt(0).path.chmod(folder)
    take(home, piece("attempt-000/rank-00000.out"))
    assert home.attempt(0).out(0).stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("at", ["file", "folder"])
def test_no_link_is_followed_where_a_piece_is_kept(home: RunDir, tmp_path: Path, at: str) -> None:
    (tmp_path / "outside").mkdir()
    precious = tmp_path / "outside" / "rank-00000.out"
    precious.write_text("precious")
    if at == "file":
        home.attempt(0).out(0).symlink_to(precious)
    else:
        home.attempt(0).path.rmdir()
        home.attempt(0).path.symlink_to(precious.parent)
    with pytest.raises(RunFolderError, match="cannot write here"):
        take(home, piece("attempt-000/rank-00000.out"))
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("what", ["link", "pipe", "folder", "folder of it", "other user"])
def test_a_node_sends_nothing_but_regular_files_of_its_user(
    away: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    secret, attempt = tmp_path / "rank-00000.out", away.attempt(0)
    secret.write_text("secret")
    if what == "folder of it":
        attempt.path.rmdir()
        attempt.path.symlink_to(tmp_path)
    elif what == "link":
        attempt.out(0).symlink_to(secret)
    elif what == "pipe":
        os.mkfifo(attempt.out(0))
    elif what == "folder":
        attempt.out(0).mkdir()
    elif os.geteuid():
        pytest.skip("needs root, to give a file to another user")
    else:
        attempt.out(0).write_text("secret")
        os.chown(attempt.out(0), 12346, 12346)
    courier = courier_of(away)
    assert list(courier.news()) == []
    assert list(courier.news()) == []
    assert capsys.readouterr().err.count(f"{attempt.out(0)}: not sent") == 1


def test_what_cannot_be_kept_is_said_with_the_folder(home: RunDir) -> None:
    home.attempt(0).out(0).mkdir()
    with pytest.raises(RunFolderError, match=r"rank-00000.out: cannot write here: Is a directory; choose another"):
        take(home, piece("attempt-000/rank-00000.out"))


def test_a_full_disk_is_a_matter_of_storage(home: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(StorageError, match="No space left on device; free some space"):
        take(home, piece("metrics.jsonl"))


def test_the_copy_at_home_of_a_long_log_is_capped_too(home: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    block = logcap.BLOCK_BYTES
    monkeypatch.setattr(storage, "cap", partial(logcap.cap, first=block, last=block, step=block))
    log, rows = home.attempt(0).out(0), home.attempt(0).metrics(0)
    for path in (log, rows):
        for number in range(16):
            keep(home, [path], (str(path.relative_to(home.path)), number * block, b"x" * block))
    assert [path.stat().st_size for path in (log, rows)] == [16 * block] * 2
    assert log.stat().st_blocks * 512 <= 3 * block
    assert rows.stat().st_blocks * 512 >= 16 * block
