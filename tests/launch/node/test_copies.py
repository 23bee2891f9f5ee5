"""The memory of nodes: two agents' folders and real connections between them."""

import asyncio
import os
import resource
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from muster.jobs.basics.errors import UnreachableError
from muster.jobs.checkpoint import remote
from muster.jobs.checkpoint.commit import begin
from muster.jobs.checkpoint.manifest import read_manifest
from muster.jobs.checkpoint.pieces import whole
from muster.jobs.checkpoint.read import CheckpointReader
from muster.jobs.checkpoint.remote import NodesMemory
from muster.jobs.checkpoint.shard import ShardRecord, write_shard
from muster.jobs.hosts.ranks import MEMORY
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.launch.node import copies as module
from muster.launch.node.copies import Copies, delete_leftovers, prefix
from muster.launch.node.copy_requests import put
from muster.launch.wire import messages as wire

NAME, KEY, LOCAL = "step-00000010.a000", "ab" * 32, "127.0.0.1"


class Node:
    """The memory of one node, and what it has told the supervisor."""

    def __init__(self) -> None:
        self.told: list[wire.FromAgent] = []
        self.copies = Copies(self._tell)

    async def _tell(self, message: wire.FromAgent) -> None:
        self.told.append(message)

    async def keep(self) -> int:
        await self.copies.keep(wire.KeepCopies(0, KEY, LOCAL))
        (answer,) = [each for each in self.told if isinstance(each, wire.Keeping)]
        assert answer.why == ""
        return answer.port

    def write(self, writer: int, data: bytes = b"12345678") -> ShardRecord:
        """Write a shard, as the writer of a rank does."""
        assert self.copies.run is not None
        folder = begin(self.copies.run, 10, 0)
        pieces = [(whole(f"model/{writer}", "U8", (len(data),)), data)]
        return write_shard(folder, writer, 2, pieces, meta={} if writer == 0 else None)

    def kept(self) -> set[int]:
        return {each.writer for each in self.told if isinstance(each, wire.Kept)}

    def folder(self) -> Path:
        assert self.copies.run is not None
        return self.copies.run.checkpoints / NAME


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def with_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, work: Callable[[Node, Node, int], Awaitable[None]]
) -> None:
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)

    async def run() -> None:
        one, other = Node(), Node()
        try:
            await one.keep()
            await work(one, other, await other.keep())
        finally:
            one.copies.close()
            other.copies.close()

    asyncio.run(run())
    assert list(tmp_path.iterdir()) == []  # the memory is free again


def test_a_shard_is_copied_and_both_nodes_report_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def work(one: Node, other: Node, port: int) -> None:
        one.copies.copy_to(wire.CopyTo(0, "other", LOCAL, port))
        record = one.write(0)
        await until(lambda: one.kept() == other.kept() == {0})
        copy = other.folder() / record.file
        assert copy.read_bytes() == (one.folder() / record.file).read_bytes()
        assert [Path(one.copies.environment()[MEMORY]).stat().st_mode & 0o777] == [0o700]
        one.copies.mark(wire.Complete(0, NAME))
        assert (one.folder() / "COMPLETE").exists()
        one.copies.mark(wire.Complete(0, "", only=True))
        assert not one.folder().exists()

    with_nodes(monkeypatch, tmp_path, work)


def port_of(node: Node) -> int:
    return next(each.port for each in node.told if isinstance(each, wire.Keeping))


async def prepare(one: Node, other: Node) -> list[wire.Fetched]:
    """Prepare the reading of a checkpoint of which `one` has shard 0 and `other` shard 1; `one` collects."""
    table = ((LOCAL, port_of(one), ((0, 0),)), (LOCAL, port_of(other), ((1, 1),)))
    await asyncio.gather(
        other.copies.fetch(wire.Fetch(1, NAME, KEY, 2, False, ((LOCAL, port_of(one), ()),))),
        one.copies.fetch(wire.Fetch(1, NAME, KEY, 2, True, table)),
    )
    return [each for node in (one, other) for each in node.told if isinstance(each, wire.Fetched)]


def read(node: Node, name: str, count: int) -> bytes:
    """Read a tensor of the prepared checkpoint, as a rank of the node does."""
    folder = CheckpointDir(node.folder())
    with CheckpointReader(folder, read_manifest(folder), remote=NodesMemory(folder)) as reader:
        reader.read_into(whole(name, "U8", (count,)), data := bytearray(count))
    return bytes(data)


def test_ranks_read_ranges_of_shards_that_other_nodes_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = os.urandom(9 << 20)  # several requests

    async def work(one: Node, other: Node, port: int) -> None:
        one.write(0)
        other.write(1, data)
        answers = await prepare(one, other)
        assert [each.why for each in answers] == ["", ""]
        assert answers[0].sha256 == answers[1].sha256 != ""
        assert await asyncio.to_thread(read, one, "model/1", len(data)) == data
        assert await asyncio.to_thread(read, other, "model/0", 8) == b"12345678"
        assert {path.name for path in one.folder().glob("shard-*")} == {"shard-00000.ok", "shard-00000.safetensors"}

    with_nodes(monkeypatch, tmp_path, work)


def test_a_rank_is_told_if_no_node_has_a_shard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def work(one: Node, other: Node, port: int) -> None:
        one.write(0)
        other.write(1)
        await prepare(one, other)
        other.copies.close()
        monkeypatch.setattr(remote, "PATIENCE_S", 0.2)
        with pytest.raises(UnreachableError, match=r"no node has sent shard 1: the node at 127.0.0.1"):
            await asyncio.to_thread(read, one, "model/1", 8)

    with_nodes(monkeypatch, tmp_path, work)


def test_shards_that_only_one_node_has_are_copied_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def work(one: Node, other: Node, port: int) -> None:
        one.write(0)
        other.write(1)
        await prepare(one, other)
        one.copies.mark(wire.Complete(1, NAME, only=True))
        one.copies.attempt = 1
        one.copies.copy_to(wire.CopyTo(1, "other", LOCAL, port))
        await until(lambda: other.kept() == {0, 1})

    with_nodes(monkeypatch, tmp_path, work)


def test_a_damaged_shard_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def work(one: Node, other: Node, port: int) -> None:
        one.write(0)
        record = other.write(1)
        path = other.folder() / record.file
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        sound, damaged = await prepare(one, other)
        assert sound.why == ""
        assert "damaged: its sha256 differs from the saved one" in damaged.why

    with_nodes(monkeypatch, tmp_path, work)


def test_a_copy_that_cannot_be_made_is_marked_as_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def work(one: Node, other: Node, port: int) -> None:
        with socket.create_server((LOCAL, 0)) as taken:
            dead = taken.getsockname()[1]
        one.copies.copy_to(wire.CopyTo(0, "other", LOCAL, dead))
        one.write(0)
        await until(lambda: (one.folder() / "FAILED").exists())
        await until(lambda: "no copy on other" in (one.folder() / "FAILED").read_text())

    with_nodes(monkeypatch, tmp_path, work)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.0\r\n\r\n", b"x" * 4096, b"muster/1 agent 0 aa 127.0.0.1:1\n"])
def test_a_stranger_gets_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: bytes) -> None:
    async def work(one: Node, other: Node, port: int) -> None:
        other.write(0)
        with socket.create_connection((LOCAL, port), 5) as stranger:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):  # it hung up with something unread
                assert await asyncio.to_thread(stranger.recv, 4096) == b""

    with_nodes(monkeypatch, tmp_path, work)


def test_a_node_with_another_key_gets_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def work(one: Node, other: Node, port: int) -> None:
        one.write(0)
        other.write(1)
        one.copies.secret = "cd" * 32
        await one.copies.fetch(wire.Fetch(1, NAME, KEY, 2, True, ((LOCAL, port, ((1, 1),)),)))
        answer = one.told[-1]
        assert isinstance(answer, wire.Fetched)
        assert "does not hold" in answer.why

    with_nodes(monkeypatch, tmp_path, work)


def test_with_the_key_of_ranks_nothing_can_be_put(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def work(one: Node, other: Node, port: int) -> None:
        one.write(0)
        record = other.write(1)
        assert other.copies.run is not None
        key = (other.copies.run.path / remote.KEY).read_text()
        assert key != KEY

        def attempt() -> None:
            with remote.dialled(LOCAL, port_of(one), key, remote.READER) as connection:
                assert connection.ask(remote.get(NAME, "shard-00000.ok"))[0]["bytes"] > 0
                put(connection, CheckpointDir(other.folder()), record, lambda _: None)

        with pytest.raises(UnreachableError):
            await asyncio.to_thread(attempt)
        assert {path.name for path in one.folder().glob("shard-*")} == {"shard-00000.ok", "shard-00000.safetensors"}

    with_nodes(monkeypatch, tmp_path, work)


def test_the_folder_of_a_killed_agent_is_deleted_but_not_that_of_a_living_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dead = tmp_path / f"{prefix()}dead"
    dead.mkdir()
    (dead / "lock").touch()
    foreign = tmp_path / "muster-other"
    foreign.mkdir()
    monkeypatch.setattr(module, "LOCKED_S", 0.0)

    async def work(one: Node, other: Node, port: int) -> None:
        assert not dead.exists()
        delete_leftovers(tmp_path)
        assert one.copies.run is not None
        assert one.copies.run.path.exists()
        assert foreign.exists()
        foreign.rmdir()

    with_nodes(monkeypatch, tmp_path, work)
    assert os.listdir(tmp_path) == []  # noqa: PTH208


@pytest.mark.parametrize("said", [b"", b"muster/1 age", b"muster/1 agent 0 aa 127.0.0.1:1\n"])
def test_many_slow_strangers_stop_no_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: bytes) -> None:
    """More than have room; none of them gets a thread, and each is hung up on after the time for a handshake."""

    async def work(one: Node, other: Node, port: int) -> None:
        threads = threading.active_count()
        strangers = [socket.create_connection((LOCAL, port), 5) for _ in range(2 * module.MOST_CONNECTIONS)]
        for each in strangers:
            each.sendall(said)
        await asyncio.sleep(0)
        assert threading.active_count() == threads
        one.copies.copy_to(wire.CopyTo(0, "other", LOCAL, port))
        one.write(0)
        await until(lambda: one.kept() == other.kept() == {0})
        for each in strangers:
            each.settimeout(0.0)
        await until(lambda: all(map(is_hung_up, strangers)))
        for each in strangers:
            each.close()

    monkeypatch.setattr("muster.launch.wire.door.HANDSHAKE_S", 1.0)
    with_nodes(monkeypatch, tmp_path, work)


def is_hung_up(end: socket.socket) -> bool:
    """Send another byte of a greeting, and return whether the other end has closed the connection."""
    try:
        end.send(b"m")
        return end.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_an_error_of_accept_does_not_end_the_listener(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No descriptor is free when a stranger connects."""

    async def work(one: Node, other: Node, port: int) -> None:
        stranger = socket.socket()
        stranger.setblocking(False)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
        held = [os.dup(0) for _ in range(highest)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, hard))
        try:
            with suppress(BlockingIOError):
                stranger.connect((LOCAL, port))
            assert other.copies._door is not None
            await until(lambda: other.copies._door._refused.total() > 1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for each in held:
                os.close(each)
            stranger.close()
        one.copies.copy_to(wire.CopyTo(0, "other", LOCAL, port))
        one.write(0)
        await until(lambda: one.kept() == other.kept() == {0})

    monkeypatch.setattr("muster.launch.wire.door.REPORT_S", 60.0)
    with_nodes(monkeypatch, tmp_path, work)
