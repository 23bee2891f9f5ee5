"""The cells that remain to be measured or are skipped after failures. Pure; the launch manager of rank 0 uses it.

If an operation fails, its other cells are skipped in that launch. An operation that has failed in MOST_FAILURES
launches is skipped in all later launches. If the ranks of a launch did not start to measure, it is tried a second time.
After MOST_FAILURES launches that measured nothing, no more launches begin. Skipped cells also get rows.
"""

from collections.abc import Sequence
from typing import Final

from muster.collectives_bench.plan import order_of
from muster.collectives_bench.records import BenchCell
from muster.collectives_bench.sizes import size_text

MOST_FAILURES: Final = 2  # launches
MOST_STARTS: Final = 2  # number of tries of a launch

Skipped = tuple[int, str]  # the cell, and the reason


class RemainingCells:
    """The remaining cells of every launch."""

    def __init__(self, cells: Sequence[BenchCell], seed: int) -> None:
        self.cells = list(cells)
        self.seed = seed
        self.launch = -1
        self.left: list[int] = []
        self._starts = 0
        self._failed: dict[str, set[int]] = {}  # the launches in which an operation failed, by operation
        self._empty: list[str] = []  # the reasons of launches that measured nothing

    def begin(self, launch: int) -> list[Skipped]:
        """Begin a launch; return the cells that it will skip."""
        self.launch, self._starts = launch, 0
        self.left = order_of(self.cells, launch, self.seed)
        if len(self._empty) >= MOST_FAILURES:
            return self._skip(self.left, f"skipped: no launch could start: {self._empty[-1]}")
        skipped = []
        for operation, launches in self._failed.items():
            if len(launches) >= MOST_FAILURES:
                skipped += self._skip(self._of(operation), f"skipped: {operation} failed in {len(launches)} launches")
        return skipped

    def done(self, cell: int) -> None:
        """Record that a cell has its row in this launch."""
        if cell in self.left:
            self.left.remove(cell)

    def failed(self, cell: int) -> list[Skipped]:
        """Record that a cell failed and has its row; return the cells skipped for that reason."""
        self.done(cell)
        operation = self.cells[cell].operation
        self._failed.setdefault(operation, set()).add(self.launch)
        where = size_text(self.cells[cell].asked_bytes) if self.cells[cell].asked_bytes else "all"
        return self._skip(self._of(operation), f"skipped: {operation} failed at {where} in this launch")

    def never_began(self, reason: str) -> list[Skipped]:
        """Record that the workers did not reach their first cell; return the cells skipped for that reason."""
        self._starts += 1
        if self._starts < MOST_STARTS:
            return []
        self._empty.append(reason)
        return self._skip(self.left, f"the launch did not start: {reason}")

    def never_will(self, reason: str) -> list[Skipped]:
        """Record that nothing more can be measured in this launch; return the cells skipped for that reason."""
        return self._skip(self.left, f"never began: {reason}")

    def _of(self, operation: str) -> list[int]:
        return [cell for cell in self.left if self.cells[cell].operation == operation]

    def _skip(self, cells: Sequence[int], reason: str) -> list[Skipped]:
        gone = sorted(cells)
        self.left = [cell for cell in self.left if cell not in set(gone)]
        return [(cell, reason) for cell in gone]
