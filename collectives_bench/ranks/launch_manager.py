"""The launch manager: runs in each rank's own process. It forks a worker for each launch, watches it, and never
measures.

    launch managers          rank 0's is the leader: it decides what to measure, judges failures, writes the file
    TRY/order                from the leader: an `Order`, or null at the end
    TRY/trouble              from any: a worker has failed or hangs, so all workers are ended
    TRY/ending/RANK          how that rank's worker ended; the leader waits for all, then decides how to continue
    leaving/RANK             that rank has been asked to end, by SIGTERM

A launch manager that dies or hangs ends the attempt, because a rank is missing. The leader notices that itself, or a
supervisor that noticed it asks the leader to end. In both cases it first writes rows for all cells not measured. A
worker that dies breaks its process group, so the rest of its launch is retried with fresh workers. Launch managers run
no torch operation and have no threads, because they fork.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final, NoReturn

from muster.collectives_bench.ranks.agenda import Agenda, Skipped
from muster.collectives_bench.ranks.company import Company
from muster.collectives_bench.ranks.judge import Ending, judge, pair_culprit
from muster.collectives_bench.ranks.launch_worker import LEAST_INIT_S, Order, play
from muster.collectives_bench.ranks.ledger import Ledger
from muster.collectives_bench.records import Cell, State
from muster.collectives_bench.settings import BenchSettings
from muster.jobs.basics.errors import StartTimeoutError
from muster.jobs.basics.words import spell_ranks
from muster.jobs.world.forked import Forked

POLL_S: Final = 0.2
VICTIM_S: Final = 1.0  # time for a worker to notice that another one has failed
CAUSE_S: Final = 0.3  # the same if the cause of the failure is known
STALL_MARGIN_S: Final = 1.0  # beyond timeout_s, when every wait in a group has ended with an error
ENDINGS_S: Final = 20.0
NEXT_ORDER_S: Final = 600.0  # long, because the leader may wait for a slow disk
LEAVE_S: Final = 2.0  # time for others to say that they leave too; shorter than most grace periods
MOST_TRIES: Final = 3  # of a launch of pairs; later tries skip failed pairs
GOING: Final = "the rest cannot be measured without it in this attempt"


class Leaving(Exception):
    """This rank has been asked to end, by SIGTERM."""


class LaunchManager:
    """One rank's launch manager; `ledger` exists only on rank 0, the leader."""

    def __init__(self, company: Company, settings: BenchSettings, cells: Sequence[Cell], ledger: Ledger | None) -> None:
        self.company = company
        self.settings = settings
        self.cells = list(cells)
        self.rank = company.env.rank
        self.ledger = ledger
        self.agenda = Agenda(self.cells, settings.seed)
        self._number = 0
        self._tries = 0  # tries of this launch
        self._at: int | None = None  # the cell that the worker entered last
        self._pair: tuple[int, int] | None = None  # the pair of nodes that it measured last
        self._is_asked_to_end = False

    def run(self) -> None:
        """Run all launches.

        Raises:
            StartTimeoutError: if another launch manager is gone.
        """
        before = signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            if self.ledger is None:
                while (order := self._next_order()) is not None:
                    self._tell_ending(order, self._perform(order))
            else:
                self._lead(self.ledger)
        except Leaving:
            self._leave()
        finally:
            signal.signal(signal.SIGTERM, before)
        if self._is_asked_to_end:  # SIGTERM arrived while the last launch ended
            os.kill(os.getpid(), signal.SIGTERM)

    # The leader -----------------------------------------------------------------------------------------------------

    def _lead(self, ledger: Ledger) -> None:
        agenda = self.agenda
        for launch in range(self.settings.launches):
            self._write_skipped(ledger, launch, agenda.begin(launch))
            self._tries = 0
            while agenda.left:
                self._number += 1
                self._tries += 1
                order = Order(self._number, launch, tuple(agenda.left), ledger.failed_pairs)
                self.company.say(f"{self._number}/order", asdict(order))
                endings = self._endings(ledger, order, self._perform(order))
                if any(each.how != "done" for each in endings):
                    self._write_failure(ledger, endings)
        self.company.say(f"{self._number + 1}/order", None)
        ledger.end()

    def _endings(self, ledger: Ledger, order: Order, mine: Ending) -> list[Ending]:
        self._tell_ending(order, mine)
        deadline = time.monotonic() + ENDINGS_S
        keys = [f"{order.number}/ending/{rank}" for rank in range(self.company.env.world_size)]
        try:
            for key in keys:
                self._wait(key, deadline)
            return [Ending(**self.company.hear(key, ENDINGS_S)) for key in keys]
        except StartTimeoutError as error:  # a rank is gone, not only its worker: measuring cannot continue
            missing: list[int] = []
            with suppress(StartTimeoutError):  # the store may be gone, too
                missing = [rank for rank, key in enumerate(keys) if not self.company.has_been_said(key)]
            self._write_rest(ledger, missing, str(error), state="timeout" if missing else "failed")
            raise

    def _write_failure(self, ledger: Ledger, endings: Sequence[Ending]) -> None:
        blame, agenda = judge(endings, self.settings.timeout_s), self.agenda
        reason = blame.reason
        if self.settings.pairs and (culprit := pair_culprit(endings)) is not None and culprit.pair is not None:
            if not culprit.is_cause and not culprit.stopped:
                reason = f"rank {culprit.rank}: {culprit.message}"
            ledger.fail_pair((culprit.pair[0], culprit.pair[1]), reason, blame.state)
        print(f"muster: launch {agenda.launch + 1}: {reason}", file=sys.stderr, flush=True)
        if self.settings.pairs and self._may_try_again(ledger, endings):
            return
        cell = next((each for each in (blame.cell, endings[0].cell) if each in agenda.left), None)
        if cell is None and all(each.cell is None for each in endings):
            self._write_skipped(ledger, agenda.launch, agenda.never_began(blame.reason))
        elif cell is None and agenda.left:
            cell = agenda.left[0]  # between two cells
        if cell is not None:
            ledger.fail(agenda.launch, self.cells[cell], blame.reason, state=blame.state, rank=blame.rank)
            self._write_skipped(ledger, agenda.launch, agenda.failed(cell))

    def _may_try_again(self, ledger: Ledger, endings: Sequence[Ending]) -> bool:
        """Return True if other pairs of a launch can still be measured without the failed ones."""
        nodes, began = self.company.world.nodes, any(each.cell is not None for each in endings)
        return began and self._tries < MOST_TRIES and len(ledger.failed_pairs) < nodes * (nodes - 1) // 2

    def _write_rest(self, ledger: Ledger, missing: Sequence[int], why: str, *, state: State = "failed") -> None:
        """Write rows for everything that will not be measured, because these ranks are gone."""
        agenda, at = self.agenda, self._at
        whom = f"{spell_ranks(list(missing)) if missing else 'the store'} {'have' if len(missing) > 1 else 'has'} gone"
        reason = f"{whom}: {why}; {GOING}"
        print(f"muster: launch {agenda.launch + 1}: {reason}", file=sys.stderr, flush=True)
        if at in agenda.left:
            ledger.fail(agenda.launch, self.cells[at], reason, state=state, rank=missing[0] if missing else None)
            agenda.done(at)
        self._write_skipped(ledger, agenda.launch, agenda.never_will(whom))
        for launch in range(agenda.launch + 1, self.settings.launches):
            self._write_skipped(ledger, launch, agenda.begin(launch))
            self._write_skipped(ledger, launch, agenda.never_will(whom))

    def _write_skipped(self, ledger: Ledger, launch: int, skipped: Sequence[Skipped]) -> None:
        for cell, reason in skipped:
            ledger.fail(launch, self.cells[cell], reason)

    # Everybody ------------------------------------------------------------------------------------------------------

    def _next_order(self) -> Order | None:
        self._number += 1
        self._wait(key := f"{self._number}/order", time.monotonic() + NEXT_ORDER_S)
        said = self.company.hear(key, ENDINGS_S)
        return None if said is None else Order(**said)

    def _wait(self, key: str, deadline: float) -> None:
        """Wait for a value until a deadline (monotonic seconds); errors as for `Company.hear`, and `Leaving`."""
        while not self.company.comes(key, POLL_S):
            self._check_leaving()
            if time.monotonic() >= deadline:
                self.company.hear(key, 0.001)  # raises an error that names the missing rank
                return

    def _on_sigterm(self, *_: object) -> None:
        self._is_asked_to_end = True

    def _check_leaving(self) -> None:
        if self._is_asked_to_end:
            raise Leaving

    def _leave(self) -> NoReturn:
        """End as SIGTERM ends a process by default. The leader first finds out which rank was gone before."""
        with suppress(StartTimeoutError):
            self.company.say(f"leaving/{self.rank}", "")
            if self.ledger is not None:
                # for ranks that have not been asked to end
                self.company.say(f"{self._number}/trouble", {"explained": True})
                if missing := self._missing():
                    self._write_rest(self.ledger, missing, "its process has ended, or stands still")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("SIGTERM is not blocked")

    def _missing(self) -> list[int]:
        """List the ranks that neither leave nor have reported how their worker ended."""
        deadline = time.monotonic() + LEAVE_S
        left = [rank for rank in range(self.company.env.world_size) if rank != self.rank]
        while left and time.monotonic() < deadline:
            self.company.comes(f"leaving/{left[0]}", POLL_S / 2)
            left = [
                rank
                for rank in left
                if not self.company.has_been_said(f"leaving/{rank}")
                and not self.company.has_been_said(f"{self._number}/ending/{rank}")
            ]
        return left

    def _tell_ending(self, order: Order, ending: Ending) -> None:
        self.company.say(f"{order.number}/ending/{self.rank}", asdict(ending))

    def _perform(self, order: Order) -> Ending:
        """Run a worker; return how it ended, after reporting a failure to the others."""
        trouble = f"{order.number}/trouble"
        worker = Forked(lambda tell, page: play(self.company, self.settings, self.cells, order, tell, page))
        watch = Watch(self.settings.timeout_s)
        self._at = self._pair = None
        end_at = float("inf")

        def is_over() -> bool:
            nonlocal end_at
            self._check_leaving()
            now = time.monotonic()
            if end_at == float("inf") and self.company.has_been_said(trouble):
                end_at = now + (CAUSE_S if self.company.hear(trouble, ENDINGS_S)["explained"] else VICTIM_S)
            return now >= end_at or watch.is_stalled(worker.page.beats, now, has_begun=self._at is not None)

        ended = worker.followed(self._note, is_over, POLL_S)
        ending = Ending(rank=self.rank, cell=self._at, pair=self._pair, **asdict(ended))
        self._check_leaving()  # a rank that was asked to end ends its worker: that is not a failure
        if ending.how != "done" and end_at == float("inf"):
            self.company.say(trouble, {"explained": ending.is_cause})
        return ending

    def _note(self, message: dict[str, Any]) -> None:
        self._at = message.get("enter", self._at)
        self._pair = message.get("meet", self._pair)
        if self.ledger is None:
            return
        if "ready" in message:
            self.ledger.header(message["ready"])
        elif "block" in message:
            self.ledger.add(message["block"])
        elif "pairs" in message:
            self.ledger.keep_pairs(message["pairs"])
        if "of" in message:
            self.agenda.done(message["of"])
            if self.settings.pairs:
                self.ledger.end_pairs(self.agenda.launch)


class Watch:
    """Detects a worker that starts no call for longer than a call may take."""

    def __init__(self, timeout_s: float) -> None:
        self.limit_s = timeout_s + STALL_MARGIN_S
        self.first_limit_s = max(LEAST_INIT_S, timeout_s) + STALL_MARGIN_S
        self._beats = -1
        self._since = time.monotonic()

    def is_stalled(self, beats: int, now: float, *, has_begun: bool) -> bool:
        """Return True if its last call exceeded the limit; `now` in monotonic seconds."""
        if beats != self._beats:
            self._beats, self._since = beats, now
        return now - self._since > (self.limit_s if has_begun else self.first_limit_s)
