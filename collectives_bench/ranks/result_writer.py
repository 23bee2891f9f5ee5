"""The result file of a benchmark: first the header, then each block when it is finished, and `end` when everything is
measured.

Only rank 0 writes the file.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from muster.collectives_bench.catalog import OPERATIONS, actual_bytes
from muster.collectives_bench.ranks.bench_ranks import BenchRanks
from muster.collectives_bench.ranks.pairs import pair_record
from muster.collectives_bench.records import BenchCell, BenchHeader, Block, State
from muster.collectives_bench.settings import BenchSettings
from muster.jobs.basics.rowlog import RowLog
from muster.jobs.measuring.recorded import End

BAD: Final[tuple[State, ...]] = ("wrong", "failed", "timeout")


class ResultWriter:
    """A writer of records. It counts them by state."""

    def __init__(
        self, path: Path, bench_ranks: BenchRanks, settings: BenchSettings, *, name: str, say: Callable[[str], None]
    ) -> None:
        self.path = path
        self.bench_ranks = bench_ranks
        self.settings = settings
        self.name = name
        self.states: Counter[str] = Counter()
        self.started = time.monotonic()
        self._log = RowLog(path, patient=True, say=say)
        self._has_header = False
        self._pairs: dict[tuple[int, int], dict[str, Any]] = {}
        self._failed_pairs: dict[tuple[int, int], dict[str, Any]] = {}

    def header(self, init_s: float | None = None) -> None:
        """Write the header, unless the file has one."""
        if self._has_header:
            return
        self._has_header = True
        header = BenchHeader(
            name=self.name,
            world=self.bench_ranks.world,
            settings=self.settings,
            hosts=self.bench_ranks.hosts,
            torch=torch.__version__,
            nccl=nccl_version() if self.bench_ranks.world.backend == "nccl" else "",
            init_s=init_s,
            time=time.time(),
        )
        self._log.append([header.model_dump(mode="json")])

    def add(self, record: dict[str, Any]) -> None:
        """Write a block or a pair."""
        self.header()
        self.states[record["state"]] += 1
        self._log.append([record])

    def fail(
        self, launch: int, cell: BenchCell, reason: str, *, state: State = "failed", rank: int | None = None
    ) -> None:
        """Write the block of a cell that could not be measured; for the cell `pairs`, write all pairs of the launch."""
        if self.settings.pairs:
            self.end_pairs(launch, reason, state)
            return
        nbytes = actual_bytes(OPERATIONS[cell.operation], cell.asked_bytes, self.bench_ranks.world.ranks, cell.dtype)
        block = Block(
            launch=launch,
            world=self.bench_ranks.world,
            cell=cell,
            nbytes=nbytes,
            state=state,
            reason=reason,
            rank=rank,
            time=time.time(),
        )
        self.add(block.model_dump(mode="json"))

    # Pairs are written when their launch is over, because they get more samples until then ----------------------------

    def keep_pairs(self, records: Iterable[dict[str, Any]]) -> None:
        """Store the newest results of some pairs, replacing earlier ones."""
        self._pairs.update({tuple(record["nodes"]): record for record in records})

    def fail_pair(self, nodes: tuple[int, int], reason: str, state: State) -> None:
        """Record that a pair of this launch failed."""
        self._failed_pairs[nodes] = {"state": state, "reason": reason}

    @property
    def failed_pairs(self) -> tuple[tuple[int, int], ...]:
        """The failed pairs of this launch."""
        return tuple(self._failed_pairs)

    def end_pairs(self, launch: int, reason: str = "", state: State = "failed") -> None:
        """Write all pairs of a launch. `reason` says why some pairs were not measured."""
        for pair in combinations(range(self.bench_ranks.world.nodes), 2):
            missing = pair_record(self.bench_ranks, launch, pair, self.settings.pair_bytes, state=state, reason=reason)
            record = self._pairs.get(pair) or missing.model_dump(mode="json")
            self.add({**record, **self._failed_pairs.get(pair, {})})
        self._pairs.clear()
        self._failed_pairs.clear()

    def end(self) -> None:
        """Write the last line."""
        self.header()
        self._log.append([End(seconds=round(time.monotonic() - self.started, 3), time=time.time()).model_dump()])

    @property
    def bad(self) -> int:
        """The number of records that failed or were wrong."""
        return sum(self.states[state] for state in BAD)


def nccl_version() -> str:
    """Return NCCL's version, such as 2.27.5; this queries the library, not the GPU."""
    if not dist.is_nccl_available():
        return ""
    return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
