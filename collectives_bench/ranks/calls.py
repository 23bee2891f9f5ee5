"""Classes for the measured operations, with their buffers, one call, and a check of the result.

    call = prepare(...)          allocate
    call.fill()                  write new data, different from before, on every rank
    call.run()                   one call; on CUDA it is enqueued on the current stream
    call.wrong()                 number of wrong elements on this rank

The classes describe which data goes where; `operations.py` adds the functions to call. In place, a sum grows with every
call, so a check must follow a fill and exactly one call.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import Tensor

from muster.collectives_bench.catalog import OPERATIONS
from muster.collectives_bench.ranks.fills import DTYPES, UNWRITTEN, Pattern
from muster.collectives_bench.records import BenchCell

ROOT: Final = 0  # rank in the group of the root, for operations that have one


@dataclass(frozen=True)
class Setup:
    """The parameters of a call: the cell, its number of elements, the ranks and the device."""

    cell: BenchCell
    count: int  # number of elements in S
    group: dist.ProcessGroup
    device: torch.device

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        """The number of ranks in the group."""
        return dist.get_world_size(self.group)

    @property
    def chunk(self) -> int:
        """The number of elements in each rank's share of S."""
        return self.count // self.ranks

    def pattern(self) -> Pattern:
        """Return the pattern with which buffers are filled."""
        summed = OPERATIONS[self.cell.operation].reduces
        return Pattern(self.cell.dtype, self.device, self.ranks if summed else 1)

    def buffer(self, count: int) -> Tensor:
        """Allocate a buffer whose elements are marked as unwritten."""
        return torch.full((count,), UNWRITTEN, dtype=DTYPES[self.cell.dtype], device=self.device)


class Call(ABC):
    """An operation with its buffers. `parts` is the number of one-way transfers in a call."""

    parts: ClassVar[int] = 1

    def __init__(self, setup: Setup) -> None:
        self.group, self.rank, self.ranks, self.chunk = setup.group, setup.rank, setup.ranks, setup.chunk
        self.pattern = setup.pattern()
        self.number = 0  # number of fills; the data depends on it, so that old data is detected
        self._later = setup.cell.call == "async"

    @property
    def buffers_bytes(self) -> int:
        """The bytes of the buffers on this rank."""
        return sum(each.nbytes for each in self.buffers())

    def run(self) -> None:
        """Call the operation once, and wait for it if the backend supports that."""
        work = self.start(self._later)
        if work is not None:
            work.wait()

    def fill(self) -> None:
        """Write new data. All ranks must call this equally often."""
        self.number += 1
        self.refill()

    @abstractmethod
    def buffers(self) -> list[Tensor]:
        """List the allocated tensors. No tensor is a view of another one."""

    @abstractmethod
    def refill(self) -> None:
        """Write the data for the current `number`."""

    def start(self, later: bool) -> Any:
        """Call the operation (see `operations.py`). If `later`, use async_op and return the object to wait for."""
        raise NotImplementedError

    @abstractmethod
    def wrong(self) -> int:
        """Count the wrong elements after the last fill and one call."""


class Overwritten(Call):
    """An operation with one buffer of S, which the result replaces. Subclasses define the result."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.buffer = setup.buffer(setup.count)

    def buffers(self) -> list[Tensor]:
        return [self.buffer]

    def refill(self) -> None:
        self.pattern.write(self.buffer, self.rank, self.number)


class Summed(Overwritten):
    """An operation after which every rank has the sum over all ranks."""

    def wrong(self) -> int:
        return self.pattern.wrong_sum(self.buffer, self.number)


class SummedAtRoot(Overwritten):
    """An operation after which the root has the sum over all ranks; other ranks' buffers are undefined."""

    def wrong(self) -> int:
        return self.pattern.wrong_sum(self.buffer, self.number) if self.rank == ROOT else 0


class FromRoot(Overwritten):
    """An operation after which every rank has the root's data."""

    def wrong(self) -> int:
        return self.pattern.wrong_of(self.buffer, ROOT, self.number)


class TwoBuffers(Call):
    """An operation with an unmodified input and an output.

    In place, the input is part of the output, or the output is part of the input.
    """

    input: Tensor
    output: Tensor
    input_is_kept = True

    def buffers(self) -> list[Tensor]:
        return [self.input, self.output]

    def refill(self) -> None:
        self.output.fill_(UNWRITTEN)
        self.pattern.write(self.input, self.rank, self.number)

    def wrong(self) -> int:
        kept = self.pattern.wrong_of(self.input, self.rank, self.number) if self.input_is_kept else 0
        return kept + self.wrong_output()

    @abstractmethod
    def wrong_output(self) -> int:
        """Count the wrong elements of the output."""


class Gathered(TwoBuffers):
    """An operation whose output has all ranks' chunks in rank order. In place, the input is part of the output."""

    def __init__(self, setup: Setup, *, has_output: bool = True) -> None:
        super().__init__(setup)
        self.output = setup.buffer(setup.count if has_output else 0)
        self.places = list(self.output.chunk(self.ranks)) if has_output else []
        self.input_is_kept = setup.cell.place == "out"
        self.input = setup.buffer(self.chunk) if self.input_is_kept else self.places[self.rank]

    def buffers(self) -> list[Tensor]:
        return [self.input, self.output] if self.input_is_kept else [self.output]

    def wrong_output(self) -> int:
        return sum(self.pattern.wrong_of(place, rank, self.number) for rank, place in enumerate(self.places))


class GatheredAtRoot(Gathered):
    """An operation in which the root's output has the chunks of all ranks, and other ranks have no output."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, has_output=setup.rank == ROOT)


class ReduceScattered(TwoBuffers):
    """An operation whose output is this rank's chunk of the sum.

    In place, the output is at the place of that chunk in the input.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.input = setup.buffer(setup.count)
        self.parts_of_input = list(self.input.chunk(self.ranks))
        self.input_is_kept = setup.cell.place == "out"
        self.output = setup.buffer(self.chunk) if self.input_is_kept else self.parts_of_input[self.rank]

    def buffers(self) -> list[Tensor]:
        return [self.input, self.output] if self.input_is_kept else [self.input]

    def wrong_output(self) -> int:
        return self.pattern.wrong_sum(self.output, self.number, start=self.rank * self.chunk)


class Scattered(TwoBuffers):
    """An operation whose output is this rank's chunk of the root's data."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.input = setup.buffer(setup.count if setup.rank == ROOT else 0)
        self.pieces = list(self.input.chunk(self.ranks)) if setup.rank == ROOT else None
        self.output = setup.buffer(self.chunk)

    def wrong_output(self) -> int:
        return self.pattern.wrong_of(self.output, ROOT, self.number, start=self.rank * self.chunk)


class Exchanged(TwoBuffers):
    """An operation in which chunk j of the output is the chunk that rank j has for this rank."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.input, self.output = setup.buffer(setup.count), setup.buffer(setup.count)

    def wrong_output(self) -> int:
        start = self.rank * self.chunk
        places = enumerate(self.output.chunk(self.ranks))
        return sum(self.pattern.wrong_of(place, rank, self.number, start=start) for rank, place in places)


class FromPeer(TwoBuffers):
    """An operation whose output has the data of one other rank. A rank without a peer does nothing."""

    def __init__(self, setup: Setup, peer: int | None) -> None:
        super().__init__(setup)
        count = 0 if peer is None else setup.count
        self.peer = peer
        self.input, self.output = setup.buffer(count), setup.buffer(count)

    def wrong_output(self) -> int:
        return 0 if self.peer is None else self.pattern.wrong_of(self.output, self.peer, self.number)
