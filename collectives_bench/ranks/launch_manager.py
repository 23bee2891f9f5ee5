"""The launch manager, one in each rank's own process. It forks a worker for each launch, and watches it.

    launch managers          rank 0's is the leader: it decides what to measure, judges failures, writes the file
    TRY/order                published by the leader: a `LaunchOrder`, or null at the end
    TRY/trouble              published by any: a worker has failed or hangs, so all workers are ended
    TRY/ending/RANK          the ending of that rank's worker; the leader waits for all, then decides how to continue
    leaving/RANK             that rank has been asked to end, by SIGTERM

If a launch manager dies or hangs, the attempt ends, because a rank is missing. Either the leader notices this, or the
supervisor notices it and asks the leader to end. In both cases the leader first writes rows for all cells not measured.
A worker that dies breaks its process group, so the rest of its launch is retried with fresh workers. Launch managers
run no torch operation and have no threads, because they fork.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final, NoReturn

from muster.collectives_bench.ranks.bench_ranks import BenchRanks
from muster.collectives_bench.ranks.judge import WorkerEnd, judge, pair_culprit
from muster.collectives_bench.ranks.launch_worker import LEAST_INIT_S, LaunchOrder, play
from muster.collectives_bench.ranks.remaining_cells import RemainingCells, Skipped
from muster.collectives_bench.ranks.result_writer import ResultWriter
from muster.collectives_bench.records import BenchCell, State
from muster.collectives_bench.settings import BenchSettings
from muster.jobs.basics.errors import StartTimeoutError
from muster.jobs.basics.words import spell_ranks
from muster.jobs.world.forked import Forked

POLL_S: Final = 0.2
VICTIM_S: Final = 1.0  # time for a worker to notice that another worker has failed
CAUSE_S: Final = 0.3  # the same time, if the cause of the failure is known
STALL_MARGIN_S: Final = 1.0  # added to timeout_s; after that time, every wait in a group has failed
ENDINGS_S: Final = 20.0
NEXT_ORDER_S: Final = 600.0  # longest wait for the next order; long, because the leader may wait for a slow disk
LEAVE_S: Final = 2.0  # time for other ranks to report that they leave; shorter than most grace periods
MOST_TRIES: Final = 3  # tries of a launch of pairs; later tries skip failed pairs
GOING: Final = "the rest cannot be measured without it in this attempt"


class Leaving(Exception):
    """SIGTERM has asked this rank to end."""


class LaunchManager:
    """The launch manager of one rank. `writer` is None except on rank 0, the leader."""

    def __init__(
        self, bench_ranks: BenchRanks, settings: BenchSettings, cells: Sequence[BenchCell], writer: ResultWriter | None
    ) -> None:
        self.bench_ranks = bench_ranks
        self.settings = settings
        self.cells = list(cells)
        self.rank = bench_ranks.env.rank
        self.writer = writer
        self.remaining = RemainingCells(self.cells, settings.seed)
        self._number = 0
        self._tries = 0  # number of tries of this launch so far
        self._at: int | None = None  # the cell that the worker began last
        self._pair: tuple[int, int] | None = None  # the pair of nodes that the worker measured last
        self._is_asked_to_end = False

    def run(self) -> None:
        """Run all launches.

        Raises:
            StartTimeoutError: if another launch manager is gone.
        """
        before = signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            if self.writer is None:
                while (order := self._next_order()) is not None:
                    self._tell_ending(order, self._perform(order))
            else:
                self._lead(self.writer)
        except Leaving:
            self._leave()
        finally:
            signal.signal(signal.SIGTERM, before)
        if self._is_asked_to_end:  # SIGTERM arrived while the last launch was ending
            os.kill(os.getpid(), signal.SIGTERM)

    # The leader -----------------------------------------------------------------------------------------------------

    def _lead(self, writer: ResultWriter) -> None:
        remaining = self.remaining
        for launch in range(self.settings.launches):
            self._write_skipped(writer, launch, remaining.begin(launch))
            self._tries = 0
            while remaining.left:
                self._number += 1
                self._tries += 1
                order = LaunchOrder(self._number, launch, tuple(remaining.left), writer.failed_pairs)
                self.bench_ranks.say(f"{self._number}/order", asdict(order))
                endings = self._endings(writer, order, self._perform(order))
                if any(each.how != "done" for each in endings):
                    self._write_failure(writer, endings)
        self.bench_ranks.say(f"{self._number + 1}/order", None)
        writer.end()

    def _endings(self, writer: ResultWriter, order: LaunchOrder, mine: WorkerEnd) -> list[WorkerEnd]:
        self._tell_ending(order, mine)
        deadline = time.monotonic() + ENDINGS_S
        keys = [f"{order.number}/ending/{rank}" for rank in range(self.bench_ranks.env.world_size)]
        try:
            for key in keys:
                self._wait(key, deadline)
            return [WorkerEnd(**self.bench_ranks.hear(key, ENDINGS_S)) for key in keys]
        except StartTimeoutError as error:  # a whole rank is gone, not only its worker, so nothing more can be measured
            missing: list[int] = []
            with suppress(StartTimeoutError):  # the store may also be gone
                missing = [rank for rank, key in enumerate(keys) if not self.bench_ranks.has_been_said(key)]
            self._write_rest(writer, missing, str(error), state="timeout" if missing else "failed")
            raise

    def _write_failure(self, writer: ResultWriter, endings: Sequence[WorkerEnd]) -> None:
        blame, remaining = judge(endings, self.settings.timeout_s), self.remaining
        reason = blame.reason
        if self.settings.pairs and (culprit := pair_culprit(endings)) is not None and culprit.pair is not None:
            if not culprit.is_cause and not culprit.stopped:
                reason = f"rank {culprit.rank}: {culprit.message}"
            writer.fail_pair((culprit.pair[0], culprit.pair[1]), reason, blame.state)
        print(f"muster: launch {remaining.launch + 1}: {reason}", file=sys.stderr, flush=True)
        if self.settings.pairs and self._may_try_again(writer, endings):
            return
        cell = next((each for each in (blame.cell, endings[0].cell) if each in remaining.left), None)
        if cell is None and all(each.cell is None for each in endings):
            self._write_skipped(writer, remaining.launch, remaining.never_began(blame.reason))
        elif cell is None and remaining.left:
            cell = remaining.left[0]  # the failure happened between two cells
        if cell is not None:
            writer.fail(remaining.launch, self.cells[cell], blame.reason, state=blame.state, rank=blame.rank)
            self._write_skipped(writer, remaining.launch, remaining.failed(cell))

    def _may_try_again(self, writer: ResultWriter, endings: Sequence[WorkerEnd]) -> bool:
        """Return True if a launch of pairs can be tried again without the failed pairs."""
        nodes, began = self.bench_ranks.world.nodes, any(each.cell is not None for each in endings)
        return began and self._tries < MOST_TRIES and len(writer.failed_pairs) < nodes * (nodes - 1) // 2

    def _write_rest(self, writer: ResultWriter, missing: Sequence[int], why: str, *, state: State = "failed") -> None:
        """Write rows for all cells that will not be measured, because the `missing` ranks are gone."""
        remaining, at = self.remaining, self._at
        whom = f"{spell_ranks(list(missing)) if missing else 'the store'} {'have' if len(missing) > 1 else 'has'} gone"
        reason = f"{whom}: {why}; {GOING}"
        print(f"muster: launch {remaining.launch + 1}: {reason}", file=sys.stderr, flush=True)
        if at in remaining.left:
            writer.fail(remaining.launch, self.cells[at], reason, state=state, rank=missing[0] if missing else None)
            remaining.done(at)
        self._write_skipped(writer, remaining.launch, remaining.never_will(whom))
        for launch in range(remaining.launch + 1, self.settings.launches):
            self._write_skipped(writer, launch, remaining.begin(launch))
            self._write_skipped(writer, launch, remaining.never_will(whom))

    def _write_skipped(self, writer: ResultWriter, launch: int, skipped: Sequence[Skipped]) -> None:
        for cell, reason in skipped:
            writer.fail(launch, self.cells[cell], reason)

    # All ranks ------------------------------------------------------------------------------------------------------

    def _next_order(self) -> LaunchOrder | None:
        self._number += 1
        self._wait(key := f"{self._number}/order", time.monotonic() + NEXT_ORDER_S)
        said = self.bench_ranks.hear(key, ENDINGS_S)
        return None if said is None else LaunchOrder(**said)

    def _wait(self, key: str, deadline: float) -> None:
        """Wait for a value until a deadline (monotonic seconds).

        Raises the errors of `BenchRanks.hear`, and `Leaving`.
        """
        while not self.bench_ranks.comes(key, POLL_S):
            self._check_leaving()
            if time.monotonic() >= deadline:
                self.bench_ranks.hear(key, 0.001)  # this raises an error that names the missing rank
                return

    def _on_sigterm(self, *_: object) -> None:
        self._is_asked_to_end = True

    def _check_leaving(self) -> None:
        if self._is_asked_to_end:
            raise Leaving

    def _leave(self) -> NoReturn:
        """End this process in the way in which SIGTERM ends a process by default.

        The leader first records which ranks were already gone.
        """
        with suppress(StartTimeoutError):
            self.bench_ranks.say(f"leaving/{self.rank}", "")
            if self.writer is not None:
                # this informs the ranks that have not been asked to end
                self.bench_ranks.say(f"{self._number}/trouble", {"explained": True})
                if missing := self._missing():
                    self._write_rest(self.writer, missing, "its process has ended, or hangs")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("SIGTERM did not end this process, so it must be blocked")

    def _missing(self) -> list[int]:
        """List the ranks that are not leaving and have not reported their worker's ending."""
        deadline = time.monotonic() + LEAVE_S
        left = [rank for rank in range(self.bench_ranks.env.world_size) if rank != self.rank]
        while left and time.monotonic() < deadline:
            self.bench_ranks.comes(f"leaving/{left[0]}", POLL_S / 2)
            left = [
                rank
                for rank in left
                if not self.bench_ranks.has_been_said(f"leaving/{rank}")
                and not self.bench_ranks.has_been_said(f"{self._number}/ending/{rank}")
            ]
        return left

    def _tell_ending(self, order: LaunchOrder, ending: WorkerEnd) -> None:
        self.bench_ranks.say(f"{order.number}/ending/{self.rank}", asdict(ending))

    def _perform(self, order: LaunchOrder) -> WorkerEnd:
        """Run a worker and return its ending. If the worker failed, report that to the other ranks first."""
        trouble = f"{order.number}/trouble"
        worker = Forked(lambda tell, page: play(self.bench_ranks, self.settings, self.cells, order, tell, page))
        watch = StallDetector(self.settings.timeout_s)
        self._at = self._pair = None
        end_at = float("inf")

        def is_over() -> bool:
            nonlocal end_at
            self._check_leaving()
            now = time.monotonic()
            if end_at == float("inf") and self.bench_ranks.has_been_said(trouble):
                end_at = now + (CAUSE_S if self.bench_ranks.hear(trouble, ENDINGS_S)["explained"] else VICTIM_S)
            return now >= end_at or watch.is_stalled(worker.page.beats, now, has_begun=self._at is not None)

        ended = worker.followed(self._note, is_over, POLL_S)
        ending = WorkerEnd(rank=self.rank, cell=self._at, pair=self._pair, **asdict(ended))
        self._check_leaving()  # if this rank was asked to end, the end of its worker is not a failure
        if ending.how != "done" and end_at == float("inf"):
            self.bench_ranks.say(trouble, {"explained": ending.is_cause})
        return ending

    def _note(self, message: dict[str, Any]) -> None:
        self._at = message.get("enter", self._at)
        self._pair = message.get("meet", self._pair)
        if self.writer is None:
            return
        if "ready" in message:
            self.writer.header(message["ready"])
        elif "block" in message:
            self.writer.add(message["block"])
        elif "pairs" in message:
            self.writer.keep_pairs(message["pairs"])
        if "of" in message:
            self.remaining.done(message["of"])
            if self.settings.pairs:
                self.writer.end_pairs(self.remaining.launch)


class StallDetector:
    """Detects workers that have not started a call for longer than a call may take."""

    def __init__(self, timeout_s: float) -> None:
        self.limit_s = timeout_s + STALL_MARGIN_S
        self.first_limit_s = max(LEAST_INIT_S, timeout_s) + STALL_MARGIN_S
        self._beats = -1
        self._since = time.monotonic()

    def is_stalled(self, beats: int, now: float, *, has_begun: bool) -> bool:
        """Return True if the worker's last call exceeded the limit. `now` is in monotonic seconds."""
        if beats != self._beats:
            self._beats, self._since = beats, now
        return now - self._since > (self.limit_s if has_begun else self.first_limit_s)
