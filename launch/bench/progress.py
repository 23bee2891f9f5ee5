"""How far a measurement is, from its bench.jsonl as it grows: what is done, what is under way, the medians so far."""

import statistics

from muster.collectives_bench.plan import cells_of, order_of
from muster.collectives_bench.records import Block, Cell, Header, Pair
from muster.collectives_bench.results.files import FORMAT
from muster.collectives_bench.settings import BenchSettings
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.timing.recorded import End
from muster.launch.bench.watching import NewestRecords

Record = Header | Block | Pair | End


class Progress:
    """What has come of one run's newest attempt."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._records = NewestRecords(run, FORMAT)
        self._forget()

    def _forget(self) -> None:
        self.header: Header | None = None
        self.cells: list[Cell] = []
        self.launches = 0
        self.blocks: list[Block] = []
        self.pairs: list[Pair] = []
        self.is_over = False
        self._states: dict[Cell, str] = {}
        self._medians: dict[Cell, list[float]] = {}
        self._done: dict[int, set[Cell]] = {}

    def poll(self) -> list[Record]:
        """Take in what came since the last call, and return it; a new attempt begins anew."""
        is_new, records = self._records.poll()
        if is_new:
            self._forget()
        for record in records:
            self._take(record)
        return records

    def _take(self, record: Record) -> None:
        if isinstance(record, Header):
            settings = BenchSettings.model_validate(record.settings)
            self.header, self.launches = record, settings.launches
            self.cells = [] if settings.pairs else cells_of(settings, record.world.ranks)
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
        """The launch that is under way, from 0: the newest that has said something, or the one after it."""
        if not self.cells:
            return max((pair.launch for pair in self.pairs), default=0)
        newest = max(self._done, default=0)
        whole = len(self._done.get(newest, ())) >= len(self.cells)
        return min(newest + whole, max(self.launches - 1, 0))

    @property
    def done(self) -> int:
        """Blocks that have ended."""
        return sum(len(cells) for cells in self._done.values())

    @property
    def total(self) -> int:
        """Blocks in all, or pairs."""
        if self.header is not None and not self.cells:
            nodes = self.header.world.nodes
            return nodes * (nodes - 1) // 2 * self.launches
        return len(self.cells) * self.launches

    @property
    def current(self) -> Cell | None:
        """The cell that is being measured: the first in the launch's order that has not ended."""
        if self.header is None or self.is_over:
            return None
        done = self._done.get(self.launch, set())
        order = order_of(self.cells, self.launch, int(self.header.settings.get("seed", 0)))
        return next((self.cells[index] for index in order if self.cells[index] not in done), None)

    def median_us(self, cell: Cell) -> float | None:
        """Return the median of the launches' medians so far."""
        found = self._medians.get(cell)
        return statistics.median(found) if found else None

    def state(self, cell: Cell) -> str:
        """Return ok, the state of its last block that was not, or nothing before its first one."""
        return self._states.get(cell, "")
