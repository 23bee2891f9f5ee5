"""The display of `muster bench` while ranks measure collectives: a table of the medians so far, or plain lines."""

import statistics
from typing import TYPE_CHECKING, Final

from muster.collectives_bench.plan import cells_of, order_of
from muster.collectives_bench.records import BenchCell, BenchHeader, Block, Pair
from muster.collectives_bench.results.files import FORMAT
from muster.collectives_bench.sizes import size_text, time_text
from muster.jobs.basics.words import counted
from muster.jobs.measuring.recorded import End
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.bench.watching import View

if TYPE_CHECKING:
    from rich.console import Group

Record = BenchHeader | Block | Pair | End
STATE_STYLE: Final = {"ok": "", "wrong": "bold red", "failed": "red", "timeout": "red"}
COLUMN: Final = 11  # width of a size's column in characters


class CollectivesView(View):
    """The progress of a `bench:` job: finished blocks, the current cell, and the medians so far."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(run, FORMAT)

    def forget(self) -> None:
        """Forget all records."""
        self.header: BenchHeader | None = None
        self.cells: list[BenchCell] = []
        self.launches = 0
        self.blocks: list[Block] = []
        self.pairs: list[Pair] = []
        self.is_over = False
        self._states: dict[BenchCell, str] = {}
        self._medians: dict[BenchCell, list[float]] = {}
        self._done: dict[int, set[BenchCell]] = {}

    def take(self, record: Record) -> None:
        """Process one record."""
        if isinstance(record, BenchHeader):
            self.header, self.launches = record, record.settings.launches
            self.cells = [] if record.settings.pairs else cells_of(record.settings, record.world.ranks)
        elif isinstance(record, Block):
            self.blocks.append(record)
            self._done.setdefault(record.launch, set()).add(record.cell)
            if record.state != "ok" or record.cell not in self._states:
                self._states[record.cell] = record.state
            if record.latency is not None:
                self._medians.setdefault(record.cell, []).append(record.latency.p50_us)
        elif isinstance(record, Pair):
            self.pairs.append(record)
        else:
            self.is_over = True

    @property
    def launch(self) -> int:
        """The number of the current launch, from 0: the newest with a record, or the next one if that is complete."""
        if not self.cells:
            return max((pair.launch for pair in self.pairs), default=0)
        newest = max(self._done, default=0)
        whole = len(self._done.get(newest, ())) >= len(self.cells)
        return min(newest + whole, max(self.launches - 1, 0))

    @property
    def done(self) -> int:
        """The number of finished blocks."""
        return sum(len(cells) for cells in self._done.values())

    @property
    def total(self) -> int:
        """The total number of blocks, or of pairs."""
        if self.header is not None and not self.cells:
            nodes = self.header.world.nodes
            return nodes * (nodes - 1) // 2 * self.launches
        return len(self.cells) * self.launches

    @property
    def current(self) -> BenchCell | None:
        """The cell being measured: the first unfinished one in the launch's order."""
        if self.header is None or self.is_over:
            return None
        done = self._done.get(self.launch, set())
        order = order_of(self.cells, self.launch, self.header.settings.seed)
        return next((self.cells[index] for index in order if self.cells[index] not in done), None)

    def median_us(self, cell: BenchCell) -> float | None:
        """Return the median of the launches' medians so far."""
        found = self._medians.get(cell)
        return statistics.median(found) if found else None

    def state(self, cell: BenchCell) -> str:
        """Return the state of the cell's last failed block, "ok" if no block failed, or "" before its first block."""
        return self._states.get(cell, "")

    def line_of(self, record: Record) -> str | None:
        """Return a line of text for the start, a failure, or the end of a launch; None for other records."""
        if isinstance(record, BenchHeader):
            what = counted(len(self.cells), "cell") if self.cells else "pairs"
            launches = f"{self.launches} launch{'es' * (self.launches != 1)}"
            return f"measuring {what} in {launches}: {record.world.text}"
        if isinstance(record, Block):
            return self._of_block(record)
        if isinstance(record, Pair):
            return self._of_pair(record)
        return None

    def _of_block(self, block: Block) -> str | None:
        if block.state != "ok":
            rank = f", rank {block.rank}" if block.rank is not None else ""
            return f"{block.cell.text()}: {block.state} in launch {block.launch + 1}{rank}: {block.reason}"
        alike = [each for each in self.blocks if each.launch == block.launch]
        if alike[-1] is not block or len({each.cell for each in alike}) < len(self.cells):
            return None
        failed = sum(each.state != "ok" for each in alike)
        ending = f", {failed} not ok" if failed else ""
        return f"launch {block.launch + 1} of {self.launches}: {counted(len(self.cells), 'cell')}{ending}"

    def _of_pair(self, pair: Pair) -> str | None:
        if pair.state != "ok":
            return f"nodes {pair.nodes[0]} and {pair.nodes[1]}: {pair.state}: {pair.reason}"
        alike = [each for each in self.pairs if each.launch == pair.launch]
        if alike[-1] is not pair or len(alike) * 2 < pair.world.nodes * (pair.world.nodes - 1):
            return None
        return f"launch {pair.launch + 1} of {self.launches}: {counted(len(alike), 'pair')}"

    def table(self, width: int) -> "Group | None":
        """Return the medians so far: one line per operation and its variant, and as many columns of sizes as fit."""
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        if self.header is None:
            return None
        current = self.current
        under_way = f"now {current.text()}, " if current is not None else ""
        done = f"{self.done or len(self.pairs)} of {self.total} done"
        head = [
            self.header.world.text,
            f"launch {self.launch + 1} of {self.launches}, {under_way}{done}",
        ]
        grid = Table(box=box.SIMPLE)
        ways = list(dict.fromkeys(_way(cell) for cell in self.cells))
        by_place = {(_way(cell), cell.asked_bytes): cell for cell in self.cells}
        first = max((len(way) for way in ways), default=10)
        sizes = sorted({cell.asked_bytes for cell in self.cells} - {0})
        sizes = _spaced(sizes, max(1, (width - first - 4) // COLUMN)) or [0]
        grid.add_column("median so far", no_wrap=True)
        for size in sizes:
            grid.add_column(size_text(size) if size else "", justify="right", no_wrap=True)
        for way in ways:
            alone = by_place.get((way, 0))  # an operation without sizes is shown in the first column
            cells = [alone, *([None] * (len(sizes) - 1))] if alone else [by_place.get((way, size)) for size in sizes]
            grid.add_row(way, *(self._entry(cell, current) for cell in cells))
        lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in head]
        return Group(*lines, *([grid] if ways else []))

    def _entry(self, cell: BenchCell | None, current: BenchCell | None) -> str:
        if cell is None:
            return ""
        state, median_us = self.state(cell), self.median_us(cell)
        text = time_text(median_us / 1e6) if median_us is not None else state if state != "ok" else ""
        style = STATE_STYLE.get(state, "yellow")
        if cell == current:
            text, style = text or "…", "reverse"
        return f"[{style}]{text}[/{style}]" if style and text else text


def _way(cell: BenchCell) -> str:
    return f"{cell.operation} {cell.dtype} {cell.way}" if cell.asked_bytes else cell.operation


def _spaced(sizes: list[int], most: int) -> list[int]:
    """Choose at most `most` sizes, evenly spread, including the first and the last."""
    if len(sizes) <= most:
        return sizes
    if most == 1:
        return sizes[-1:]
    return [sizes[round(index * (len(sizes) - 1) / (most - 1))] for index in range(most)]
