"""Find the blocks that a result lacks because the job stopped before they were measured."""

from collections import Counter
from dataclasses import dataclass
from typing import Final

from muster.collectives_bench.plan import cells_of
from muster.collectives_bench.records import BenchCell, Result, WorldRecord
from muster.jobs.basics.errors import JobFileError
from muster.jobs.basics.words import counted

MOST_BLOCKS: Final = 1_000_000

NOT_REPEATED = ("refused", "unsupported")  # one block in such a state stands for all launches

Key = tuple[WorldRecord, int, BenchCell | None]


@dataclass(frozen=True)
class Missing:
    """The numbers of requested blocks (or pairs), of measured ones, and of rows without any block."""

    asked: int
    found: int
    never_begun: int

    @property
    def text(self) -> str:
        """One line about the missing blocks; "" if nothing is missing."""
        if self.found >= self.asked:
            return ""
        rows = f"; {counted(self.never_begun, 'row')} never begun" if self.never_begun else ""
        return f"not finished: {self.found} of {self.asked} blocks{rows}"


def missing(result: Result) -> Missing:
    """Compare a result with the settings in its headers.

    Raises:
        JobFileError: if the settings request more blocks than a run can have.
    """
    asked: Counter[Key] = Counter()
    for header in result.headers:
        settings, world = header.settings, header.world
        cells = [] if settings.pairs else cells_of(settings, world.ranks)
        if settings.launches * max(len(cells), 1) > MOST_BLOCKS:
            raise JobFileError(
                f"header of {header.name}: requests more than {MOST_BLOCKS:,} blocks; the file is damaged"
            )
        for launch in range(settings.launches):
            if settings.pairs:
                asked[world, launch, None] += world.nodes * (world.nodes - 1) // 2
            asked.update((world, launch, cell) for cell in cells)
    found = Counter[Key]((block.world, block.launch, block.cell) for block in result.blocks)
    found.update((pair.world, pair.launch, None) for pair in result.pairs)
    settled = {(block.world, block.cell) for block in result.blocks if block.state in NOT_REPEATED}
    begun = {(world, cell) for world, _, cell in found}
    counts = {
        key: count if (key[0], key[2]) in settled else min(count, found.get(key, 0)) for key, count in asked.items()
    }
    never_begun = {(world, cell) for world, _, cell in asked} - begun
    return Missing(sum(asked.values()), sum(counts.values()), len(never_begun))
