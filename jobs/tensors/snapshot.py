"""A copy of a rank's part of the state between two steps, in memory shared with the writer process.

The memory is an anonymous file (memfd), allocated and touched once, so that a save costs only the copy. On a CPU the
copy is done when `take` returns. On CUDA the memory is pinned, and the copy runs on its own stream, after all work
enqueued before. Later work waits for it on the device, and the host continues at once.
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
from muster.jobs.tensors.parts import TensorPart

ALIGNMENT: Final = 64
NOTHING: Final = mmap.PAGESIZE  # minimum size: a mapping cannot be empty, but a rank's part of the state can


class MemorySnapshot:
    """Memory for the parts of a rank, which contains their newest copy.

    Raises:
        RefusedError: if this machine does not have enough memory.
    """

    def __init__(self, parts: Sequence[TensorPart], device: torch.device) -> None:
        self.pieces = [part.piece for part in parts]
        self.offsets, self.nbytes = place(self.pieces)
        self.descriptor = linux.memory_file("muster-snapshot")
        size = max(self.nbytes, NOTHING)
        try:
            os.posix_fallocate(self.descriptor, 0, size)  # allocates every page before the first copy
        except OSError as error:
            os.close(self.descriptor)
            raise RefusedError(
                f"checkpoint: the copy of a rank's {size / 2**20:.0f} MB does not fit into memory: {error.strerror}; "
                "use fewer ranks per node, or remove the checkpoint section"
            ) from error
        memory = mmap.mmap(self.descriptor, size)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
        self._memory.zero_()  # touches every page, so that it is mapped into this process
        self._rooms = [
            self._memory[offset : offset + piece.nbytes].view(part.tensor.dtype).view(part.tensor.shape)
            for part, piece, offset in zip(parts, self.pieces, self.offsets, strict=True)
        ]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        if self._stream is not None:
            pin(self._memory)

    def take(self, parts: Sequence[TensorPart]) -> None:
        """Copy the parts that this memory was allocated for, after all work enqueued so far."""
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
        now.wait_event(self._copied)  # the next step must wait, because even its forward changes batch norm's buffers

    @property
    def is_complete(self) -> bool:
        """True if the copy is complete and may be read."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until the copy is complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        """Free the memory in this process. A writer that is still reading it keeps its own mapping."""
        if self._stream is not None:
            self.wait()
            unpin(self._memory)
        os.close(self.descriptor)
        self._rooms.clear()
        self._memory = torch.empty(0, dtype=torch.uint8)


def place(pieces: Sequence[Piece]) -> tuple[list[int], int]:
    """Assign aligned offsets to consecutive pieces; return the offsets and the total size."""
    offsets, end = [], 0
    for piece in pieces:
        offsets.append(end)
        end += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def copy(parts: Sequence[TensorPart], rooms: Sequence[Tensor]) -> None:
    """Copy each part into the tensor of `rooms` at the same position."""
    with torch.no_grad():
        for part, room in zip(parts, rooms, strict=True):
            room.copy_(part.tensor, non_blocking=True)


def pin(memory: Tensor) -> None:
    """Register memory with CUDA, so that copies to it run asynchronously. If this fails, copies are still correct."""
    torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)  # type: ignore[no-untyped-call]


def unpin(memory: Tensor) -> None:
    """Undo `pin`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
