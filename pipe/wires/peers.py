"""Send tensors between GPUs of one host with copy engines: no kernel runs on either GPU while a message waits.

    sender     compute   F0 ─┬─ F1 ─┬─ F2
               outgoing      └ F0's output to slot 0, `sent` := 1      └ slot 1, `sent` := 2
    receiver   incoming        wait until `sent` >= 1; slot 0 to a buffer; `taken` := 1
               compute                                                  └ F0

A slot lies on the sender's GPU, and the receiver's process maps it (cuIpcOpenMemHandle). The two counters of each
direction lie in host memory that all ranks map. Streams wait until a counter is high enough (cuStreamWaitValue32). An
NCCL receive is a kernel that spins while it waits. On an H200, receives posted ahead made matrix products take 1.7
times as long.

There are as many slots as messages can be in transit (`pipe/schedules/backlog.py`), so no send waits. So a rank never
blocks another rank, even if its host waits for its whole GPU to allocate memory or load a kernel.
"""

import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from muster.ddp.checks import gather_json
from muster.ddp.means import beside
from muster.pipe.wires import driver
from muster.pipe.wires.failures import LostError
from muster.pipe.wires.wire import PEERS_TAG, Message, Wire
from muster.zero.shared_memory import CPU, SharedMemoryPeers, shared_memory_peers

LINE: Final = 16  # distance in 32-bit numbers, so that counters of different directions share no cache line
PAGE: Final = 4096 // 4  # size in 32-bit numbers: one page, because the driver registers whole pages
ALIGNED: Final = 512  # bytes
SLOTS: Final = 2  # minimum per direction, also if `expect` was not called
FREED: Final = 1 << 30  # greater than the number of any message, so no stream waits any longer
TRIAL_S: Final = 10.0
ABORT_S: Final = 2.0


class _Ring:
    """Slots of one size, each with the number of the last message that used it."""

    def __init__(self, address: int, slot_bytes: int, slots: int) -> None:
        self.address, self.slot_bytes = address, slot_bytes
        self._last = [0] * slots
        self._next = 0

    @property
    def slots(self) -> int:
        return len(self._last)

    def take(self, number: int) -> tuple[int, int]:
        """Reserve the next slot for a message; return its address, and the number of the previous message in it."""
        at, self._next = self._next, (self._next + 1) % self.slots
        before, self._last[at] = self._last[at], number
        return self.address + at * self.slot_bytes, before


class _Way:
    """One direction between this rank and a peer. Both ends count messages and choose slots in the same way."""

    def __init__(self, sent: int, taken: int) -> None:
        self.sent, self.taken = sent, taken  # addresses of the counters
        self.number = 0
        self.slots = SLOTS
        self.rings: dict[int, _Ring] = {}
        self.asked: deque[_Coming] = deque()

    def lacks(self, slot_bytes: int) -> bool:
        """Return whether more slots of a size are needed."""
        ring = self.rings.get(slot_bytes)
        return ring is None or ring.slots < self.slots


class _Going:
    """A message being copied into its slot."""

    __slots__ = ("_device", "_event")

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        """Make the current stream wait until the sent tensor may be changed."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


class _Coming:
    """A message to receive.

    The message is copied out of its slot when this rank waits for it or for a later message.
    """

    __slots__ = ("_wire", "after", "arrived", "peer", "tensor")

    def __init__(self, wire: "PeerWire", tensor: Tensor, peer: int, after: torch.cuda.Event) -> None:
        self._wire, self.tensor, self.peer, self.after = wire, tensor, peer, after
        self.arrived: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Make the current stream wait for the message.

        Raises:
            LostError: If the peer is lost, or has no GPU memory for its slots.
        """
        self._wire.take(self)


class PeerWire:
    """A rank's connections to its peers on this host. Building one is a collective of the group's ranks."""

    ordered = True

    def __init__(
        self, neighbours: SharedMemoryPeers, peers: Iterable[int], device: torch.device, control: Wire
    ) -> None:
        rank, ranks = dist.get_rank(neighbours.group), dist.get_world_size(neighbours.group)
        self._rank, self._device, self._control = rank, device, control
        self._names = dist.get_process_group_ranks(neighbours.group)  # world ranks, for error messages
        self._outgoing, self._incoming = beside(device), beside(device)
        numbers = -(-2 * ranks * LINE // PAGE) * PAGE
        (self._counters,) = neighbours.share([(numbers, torch.int32)])
        self._memory = _DriverMemory(device, [self._outgoing, self._incoming])
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # creates the CUDA context
            at = [self._memory.register(each) for each in self._counters]
        # A rank's streams wait on the rank's own counters of messages: sent to this rank, and taken from its slots.
        self._out = {peer: _Way(at[peer] + 4 * LINE * rank, at[rank] + 4 * LINE * (ranks + peer)) for peer in peers}
        self._in = {peer: _Way(at[rank] + 4 * LINE * peer, at[peer] + 4 * LINE * (ranks + rank)) for peer in self._out}
        self._handle_sends: list[Message] = []

    def expect(self, backlogs: Mapping[tuple[int, int], int]) -> None:
        """Set the number of slots to the largest backlog of each direction. Both ends must pass the same numbers."""
        for peer in self._out:
            self._out[peer].slots = max(backlogs.get((self._rank, peer), 0), SLOTS)
            self._in[peer].slots = max(backlogs.get((peer, self._rank), 0), SLOTS)

    def mark(self) -> torch.cuda.Event:
        """Mark all work launched so far, for a receive to wait for."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def send(self, tensor: Tensor, peer: int, tag: int) -> _Going:
        """Begin to send a tensor that the current stream computes."""
        way, stream = self._out[peer], self._outgoing
        way.number += 1
        with torch.cuda.device(self._device):
            stream.wait_stream(torch.cuda.current_stream())
            if way.lacks(size := _slot_bytes(tensor)):
                way.rings[size] = self._new_ring(way, size, peer)
            slot, before = way.rings[size].take(way.number)
            if before:
                driver.wait(way.taken, before, stream.cuda_stream)
            driver.copy(slot, tensor.data_ptr(), tensor.nbytes, stream.cuda_stream)
            driver.write(way.sent, way.number, stream.cuda_stream)
        return _Going(stream.record_event(), self._device)

    def receive(self, tensor: Tensor, peer: int, tag: int, after: torch.cuda.Event | None = None) -> _Coming:
        """Prepare to receive a message after the mark, or without a mark after all work launched so far.

        Messages arrive in the order sent.
        """
        coming = _Coming(self, tensor, peer, after or self.mark())
        self._in[peer].asked.append(coming)
        return coming

    def take(self, coming: _Coming) -> None:
        """Make the current stream wait for a message. Earlier messages from this peer are copied first."""
        asked = self._in[coming.peer].asked
        with torch.cuda.device(self._device):
            while coming.arrived is None:
                self._copy_in(asked.popleft())
            torch.cuda.current_stream().wait_event(coming.arrived)

    def _copy_in(self, coming: _Coming) -> None:
        way, stream, tensor = self._in[coming.peer], self._incoming, coming.tensor
        way.number += 1
        if way.lacks(size := _slot_bytes(tensor)):
            way.rings[size] = self._opened_ring(way, size, coming.peer)
        slot, _ = way.rings[size].take(way.number)
        stream.wait_event(coming.after)
        driver.wait(way.sent, way.number, stream.cuda_stream)
        driver.copy(tensor.data_ptr(), slot, tensor.nbytes, stream.cuda_stream)
        driver.write(way.taken, way.number, stream.cuda_stream)
        coming.arrived = stream.record_event()

    def abort(self) -> None:
        """Release all waiting streams, on every rank of the group. The data they then copy is never used."""
        deadline = time.monotonic() + ABORT_S
        while True:  # a released stream may write a counter, which makes another stream wait again
            for each in self._counters:
                each.fill_(FREED)
            if self.is_idle() or time.monotonic() > deadline:
                return
            time.sleep(0.001)

    def is_idle(self) -> bool:
        """Return whether no message is in progress."""
        return self._outgoing.query() and self._incoming.query()

    def _new_ring(self, way: _Way, slot_bytes: int, peer: int) -> _Ring:
        handle, failed = bytes(driver.HANDLE_BYTES), None
        try:
            address = self._memory.allocate(slot_bytes * way.slots)
            handle = driver.handle_of(address)
        except RuntimeError as error:
            failed = error
        handle_bytes = torch.frombuffer(bytearray(handle), dtype=torch.uint8)
        self._handle_sends.append(self._control.send(handle_bytes, peer, PEERS_TAG))
        if failed is not None:
            raise failed
        return _Ring(address, slot_bytes, way.slots)

    def _opened_ring(self, way: _Way, slot_bytes: int, peer: int) -> _Ring:
        handle_bytes = torch.empty(driver.HANDLE_BYTES, dtype=torch.uint8)
        self._control.receive(handle_bytes, peer, PEERS_TAG).wait()
        if not handle_bytes.any():
            rank = self._names[peer]
            raise LostError(f"rank {rank} has no GPU memory for {way.slots} messages of {slot_bytes} bytes")
        return _Ring(self._memory.open(bytes(handle_bytes.tolist())), slot_bytes, way.slots)


def _slot_bytes(tensor: Tensor) -> int:
    return max(-(-tensor.nbytes // ALIGNED), 1) * ALIGNED


class _DriverMemory:
    """The driver resources of a wire.

    They are released when the wire is garbage-collected, or by the driver at exit.
    """

    def __init__(self, device: torch.device, streams: Sequence[torch.cuda.Stream]) -> None:
        self._registered: list[Tensor] = []
        self._allocated: list[int] = []
        self._opened: list[int] = []
        rest = self._registered, self._allocated, self._opened
        weakref.finalize(self, _give_back, device, streams, *rest).atexit = False

    def register(self, counters: Tensor) -> int:
        address = driver.register(counters.data_ptr(), counters.nbytes)
        self._registered.append(counters)
        return address

    def allocate(self, size_bytes: int) -> int:
        self._allocated.append(driver.allocate(size_bytes))
        return self._allocated[-1]

    def open(self, handle: bytes) -> int:
        self._opened.append(driver.opened(handle))
        return self._opened[-1]


def _give_back(
    device: torch.device,
    streams: Sequence[torch.cuda.Stream],
    registered: Sequence[Tensor],
    allocated: Sequence[int],
    opened: Sequence[int],
) -> None:
    """Release this process's resources.

    The memory of a slot is freed once the process that maps it has also unmapped it.
    """
    with torch.cuda.device(device):
        for stream in streams:
            stream.synchronize()
        for address in opened:
            driver.close(address)
        for address in allocated:
            driver.free(address)
        for each in registered:
            driver.unregister(each.data_ptr())


def peers_of(group: dist.ProcessGroup, peers: Iterable[int], device: torch.device, control: Wire) -> PeerWire | None:
    """Return a wire if all ranks of a gloo group can use one; else None on every rank. A collective.

    Each rank tests it by sending numbers to its peers. The test fails between hosts, without cuda-bindings, between
    GPUs that cannot access each other's memory, and in containers that hide processes or GPUs.
    """
    neighbours = shared_memory_peers(group, CPU)
    if neighbours is None or not _agreed("" if driver.is_there() else "cuda-bindings is not installed", group):
        return None
    wire, why = None, ""
    try:
        wire = PeerWire(neighbours, peers, device, control)
    except RuntimeError as error:
        why = str(error)
    if not _agreed(why, group):
        return None
    assert wire is not None
    if not _agreed(_why_not(wire, group.rank(), peers, device), group):
        wire.abort()
        return None
    return wire


def _agreed(why_not: str, group: dist.ProcessGroup) -> bool:
    """Return True if this wire works on every rank.

    A rank on which it does not work prints a warning with the reason, because NCCL is slower.
    """
    if why_not:
        warnings.warn(
            f"the GPUs of this host will exchange tensors over NCCL, which is slower: {why_not}", stacklevel=2
        )
    return not any(gather_json(why_not, group, CPU).values())


def _why_not(wire: PeerWire, rank: int, peers: Iterable[int], device: torch.device) -> str:
    """Exchange numbers with all peers; return the reason why this failed, or an empty string."""
    try:
        mine = torch.full((ALIGNED,), rank, device=device)
        theirs = {peer: torch.full_like(mine, -1) for peer in sorted(peers)}
        for peer in theirs:
            wire.send(mine, peer, 0)
        for peer, numbers in theirs.items():
            wire.receive(numbers, peer, 0).wait()
    except RuntimeError as error:
        return str(error)
    deadline = time.monotonic() + TRIAL_S
    while not wire.is_idle():
        if time.monotonic() > deadline:
            return f"no message arrived within {TRIAL_S:.0f} s"
        time.sleep(0.001)
    wrong = [peer for peer, numbers in theirs.items() if not bool((numbers == peer).all())]
    return f"the numbers received from ranks {wrong} are wrong" if wrong else ""
