"""The writer process of a rank saves its part of a checkpoint while training continues. Rank 0's writer commits.

    python -I boot.py jobs.checkpoint.writer --fd SOCKET --parent PID

Messages from the rank. "save" has two descriptors attached: the shared memory with the tensors, and the order's text.

    {"do": "save"}                     the text is a `SaveOrder`: run, step, and the pieces with their offsets in memory
    {"do": "give_up", "step": n}       another rank could not save its part: stop waiting for it

Messages to the rank:

    {"did": "shard", "step": n, "bytes": b}                         this rank's part is on disk
    {"did": "commit", "step": n, "checkpoint": name, "bytes": b}    writer 0 only: the checkpoint exists
    {"did": "all", "step": n}                  done; for writer 0: verified, and old checkpoints are deleted
    {"did": "nothing", "step": n, "kind": "StorageError", "message": "..."}          the save failed

The process imports no torch, starts in a fraction of a second, runs at low priority, and dies with its rank. It starts
with the signals blocked that ask the rank to save or stop (`jobs/saving/helper.py`).
"""

import argparse
import contextlib
import json
import mmap
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.errors import MusterError, StorageError
from muster.jobs.checkpoint.commit import IncompleteError, abandon, begin, commit
from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.checkpoint.retain import retain
from muster.jobs.checkpoint.shard import write_shard
from muster.jobs.checkpoint.verify import mark_verified, verify
from muster.jobs.machine import linux
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir

NICE: Final = 10
LISTEN_S: Final = 0.5  # how often a waiting commit checks whether to give up
POLL_S: Final = 0.02
MESSAGE_BYTES: Final = 1 << 12


@dataclass(frozen=True)
class SaveOrder:
    """An order to save `pieces`, which are given with their offsets in the shared memory."""

    run: str
    step: int
    attempt: int
    writer: int
    writers: int
    pieces: list[tuple[Piece, int]]
    meta: Mapping[str, Any] | None
    wait_s: float  # how long to wait for the other writers
    keep: int
    # The checkpoint that this attempt resumed from, which must not be deleted, however old it is.
    protect: str | None
    # The folder is in this node's memory. Its agent copies the shard to another node, and nobody commits.
    memory: bool = False

    def text(self) -> str:
        """Encode the order as JSON."""
        pieces = [[each.name, each.dtype, each.shape, each.box, each.flat, offset] for each, offset in self.pieces]
        return json.dumps({**self.__dict__, "pieces": pieces})

    @classmethod
    def read(cls, text: bytes) -> "SaveOrder":
        """Decode the result of `text`."""
        record = json.loads(text)
        pieces = [
            (Piece(name, dtype, tuple(shape), box and tuple(map(tuple, box)), flat and tuple(flat)), offset)
            for name, dtype, shape, box, flat, offset in record["pieces"]
        ]
        return cls(**{**record, "pieces": pieces})


class Writer:
    """The writer of one rank, connected to it by a socket."""

    def __init__(self, rank: socket.socket) -> None:
        self.rank = rank
        self.given_up = -1  # the step of the newest save that must not wait for other writers

    def serve(self) -> None:
        """Execute the rank's orders until the rank is gone."""
        self.rank.setblocking(True)
        while True:
            data, descriptors, _, _ = socket.recv_fds(self.rank, MESSAGE_BYTES, 2)
            if not data:
                return
            for message in map(json.loads, data.splitlines()):
                if message["do"] == "save":
                    memory, text = descriptors
                    self._save(memory, text)
                else:
                    self.given_up = message["step"]

    def _save(self, memory: int, text: int) -> None:
        order = SaveOrder.read(contents(text)[:])
        try:
            self._write_and_commit(order, contents(memory))
        except MusterError as error:
            self._say("nothing", order, kind=type(error).__name__, message=str(error))
        except Exception as error:  # an unexpected error fails only this save; training and later saves continue
            traceback.print_exc()
            self._say("nothing", order, kind=type(error).__name__, message=f"{type(error).__name__}: {error}")

    def _write_and_commit(self, order: SaveOrder, memory: mmap.mmap) -> None:
        folder = begin(RunDir(Path(order.run)), order.step, order.attempt)
        if not folder.ok(order.writer).exists():  # the last save of a job may be attempted twice
            data = memoryview(memory)
            pieces = [(piece, data[offset : offset + piece.nbytes]) for piece, offset in order.pieces]
            try:
                write_shard(folder, order.writer, order.writers, pieces, meta=order.meta)
            except StorageError:
                if order.writer == 0:  # no commit is possible, so the other shards would only fill the disk
                    abandon(folder)
                raise
        self._say("shard", order, bytes=sum(piece.nbytes for piece, _ in order.pieces))
        if order.memory:
            self._await_copies(order, folder)
        elif order.writer == 0:
            self._commit(order, folder)
        self._say("all", order)

    def _await_copies(self, order: SaveOrder, folder: CheckpointDir) -> None:
        """Wait until the agent marks the checkpoint as complete on all nodes.

        Raises:
            StorageError: if it could not be copied.
            IncompleteError: if the parts of other ranks are missing.
        """
        deadline = time.monotonic() + order.wait_s
        while not folder.complete.exists():
            if folder.failed.exists():
                raise StorageError(folder.failed.read_text(encoding="utf-8"))
            if time.monotonic() >= deadline or self._is_given_up(order.step) or not folder.path.exists():
                raise IncompleteError(f"{folder.name}: the memory of the nodes does not have all of its parts")
            time.sleep(POLL_S)

    def _commit(self, order: SaveOrder, folder: CheckpointDir) -> None:
        run = RunDir(Path(order.run))
        deadline = time.monotonic() + order.wait_s
        while True:
            wait_s = min(LISTEN_S, deadline - time.monotonic())
            try:
                manifest = commit(run, folder, order.writers, deadline_s=max(wait_s, 0.0), poll_s=POLL_S)
                break
            except IncompleteError:
                if time.monotonic() >= deadline or self._is_given_up(order.step):
                    abandon(folder)  # the other shards would only fill the disk
                    raise
            except StorageError:
                abandon(folder)
                raise
        self._say("commit", order, checkpoint=folder.name, bytes=manifest.nbytes)
        mark_verified(folder, verify(folder))
        retain(run, order.keep, [order.protect] if order.protect else [])

    def _is_given_up(self, step: int) -> bool:
        with contextlib.suppress(BlockingIOError):
            # The rank sends one order at a time, so only a "give_up" can arrive while one is being executed.
            for line in self.rank.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT).splitlines():
                self.given_up = json.loads(line)["step"]
        return self.given_up >= step

    def _say(self, did: str, order: SaveOrder, **more: Any) -> None:
        message = {"did": did, "step": order.step, **more}
        self.rank.sendall((json.dumps(message) + "\n").encode())


def contents(descriptor: int) -> mmap.mmap:
    """Map a file for reading, and close its descriptor."""
    try:
        return mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


def main() -> None:
    """Run the writer for one rank."""
    parser = argparse.ArgumentParser(description="internal: started by a rank that saves checkpoints")
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket to the rank")
    parser.add_argument("--parent", type=int, required=True, help="the rank's process id")
    args = parser.parse_args()
    linux.die_with_parent(args.parent)
    os.nice(NICE)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the rank is gone
        Writer(socket.socket(fileno=args.fd)).serve()
    sys.exit(0)


if __name__ == "__main__":
    main()
