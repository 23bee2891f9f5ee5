"""A copy of a rank's part of the state, in memory that the writer process shares; made between two steps.

The memory is a file without a name (memfd), made once and touched, so that a save costs the copy and nothing else. On
a CPU the copy is done when `take` returns. On CUDA the memory is pinned and copied to on a stream of its own: work
that was enqueued before is in the copy, what comes after waits for it on the device, and the host goes on at once.
"""

import mmap
import os
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from muster.jobs.basics.errors import RefusedError
from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.machine import linux
from muster.jobs.tensors.parts import Part

ALIGNMENT: Final = 64
NOTHING: Final = mmap.PAGESIZE  # a mapping cannot be empty; a rank's part can


class Snapshot:
    """Room for some parts, and their newest copy.

    Raises:
        RefusedError: this machine has not that much memory.
    """

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self.pieces = [part.piece for part in parts]
        self.offsets, self.nbytes = place(self.pieces)
        self.descriptor = linux.memory_file("muster-snapshot")
        size = max(self.nbytes, NOTHING)
        try:
            os.posix_fallocate(self.descriptor, 0, size)  # touches every page: the first copy finds them all
        except OSError as error:
            os.close(self.descriptor)
            raise RefusedError(
                f"checkpoint: the copy of a rank's {size / 2**20:.0f} MB does not fit into memory: {error.strerror}; "
                "use fewer ranks a node, or no checkpoint section"
            ) from error
        memory = mmap.mmap(self.descriptor, size)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping
        self._memory.zero_()  # maps every page into this process
        self._rooms = [
            self._memory[offset : offset + piece.nbytes].view(part.tensor.dtype).view(part.tensor.shape)
            for part, piece, offset in zip(parts, self.pieces, self.offsets, strict=True)
        ]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        if self._stream is not None:
            pin(self._memory)

    def take(self, parts: Sequence[Part]) -> None:
        """Copy the parts that this room was made for, as they are after all work given to the device so far."""
        assert [part.piece for part in parts] == self.pieces
        if self._stream is None:
            copy(parts, self._rooms)
            return
        now = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            copy(parts, self._rooms)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(self._stream)
        now.wait_event(self._copied)  # the next step changes weights, and batch norm's buffers even in its forward

    @property
    def is_complete(self) -> bool:
        """True when the copy may be read."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Return when the copy may be read."""
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        """Give the memory back, as far as this process holds it; a writer that reads it keeps it."""
        if self._stream is not None:
            self.wait()
            unpin(self._memory)
        os.close(self.descriptor)
        self._rooms.clear()
        self._memory = torch.empty(0, dtype=torch.uint8)


def place(pieces: Sequence[Piece]) -> tuple[list[int], int]:
    """Lay pieces one behind the other at aligned offsets; return the offsets and the end."""
    offsets, end = [], 0
    for piece in pieces:
        offsets.append(end)
        end += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def copy(parts: Sequence[Part], rooms: Sequence[Tensor]) -> None:
    """Copy each part into its room."""
    with torch.no_grad():
        for part, room in zip(parts, rooms, strict=True):
            room.copy_(part.tensor, non_blocking=True)


def pin(memory: Tensor) -> None:
    """Register memory with CUDA, so that copies to it run beside other work; without that they still are right."""
    torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)  # type: ignore[no-untyped-call]


def unpin(memory: Tensor) -> None:
    """Undo `pin`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
