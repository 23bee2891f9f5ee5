"""The conductor: what a rank's own process does. It forks a player for each launch, watches it, and never joins in.

    conductors               rank 0's leads: it says what is played, judges what went wrong, writes the file
    TRY/order                the leader's: an `Order`, or null: it is over
    TRY/trouble              anybody's: a player has failed or stands still; everybody's is ended
    TRY/ending/RANK          how that rank's player ended; the leader waits for all, then says what comes next
    leaving/RANK             that rank has been asked to end, by SIGTERM

A conductor that dies or stands still ends the attempt: the world has a hole. The leader notices it by itself, or is
asked to end by a supervisor that has; either way it writes rows of all that is not measured before it goes.

A player that dies takes its process group with it, so what is left of a launch is tried again with fresh players.
Conductors run no torch operation and have no threads: each of them forks.
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
from muster.collectives_bench.ranks.ledger import Ledger
from muster.collectives_bench.ranks.player import LEAST_INIT_S, Order, play
from muster.collectives_bench.records import Cell, State
from muster.collectives_bench.settings import BenchSettings
from muster.jobs.basics.errors import StartTimeoutError
from muster.jobs.basics.words import spell_ranks
from muster.jobs.world.forked import Forked

POLL_S: Final = 0.2
VICTIM_S: Final = 1.0  # for a player to notice by itself that another one has failed
CAUSE_S: Final = 0.3  # the same when the failure has explained itself
STALL_MARGIN_S: Final = 1.0  # beyond timeout_s, when every wait in a group has ended with an error
ENDINGS_S: Final = 20.0
NEXT_ORDER_S: Final = 600.0  # the leader may wait for a slow disk
LEAVE_S: Final = 2.0  # for the others to say that they leave too: who does not has gone; less than most graces
MOST_TRIES: Final = 3  # of a launch of pairs, without those that have failed in it
GOING: Final = "the rest cannot be measured without it in this attempt"


class Leaving(Exception):
    """This rank has been asked to end, by SIGTERM."""


class Conductor:
    """One rank's conductor; `ledger` only on rank 0, the leader."""

    def __init__(self, company: Company, settings: BenchSettings, cells: Sequence[Cell], ledger: Ledger | None) -> None:
        self.company = company
        self.settings = settings
        self.cells = list(cells)
        self.rank = company.env.rank
        self.ledger = ledger
        self.agenda = Agenda(self.cells, settings.seed)
        self._number = 0
        self._tries = 0  # of this launch
        self._at: int | None = None  # the cell that our player entered last
        self._pair: tuple[int, int] | None = None  # of nodes, which it measured last
        self._is_asked_to_end = False

    def run(self) -> None:
        """Conduct all launches.

        Raises:
            StartTimeoutError: another conductor has gone.
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
        if self._is_asked_to_end:  # at the last moment
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
        except StartTimeoutError as error:  # a rank has gone, and not only its player: there is no going on
            missing: list[int] = []
            with suppress(StartTimeoutError):  # the store itself
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
        """True where other pairs of a launch may still be measured, without those that have failed."""
        nodes, began = self.company.world.nodes, any(each.cell is not None for each in endings)
        return began and self._tries < MOST_TRIES and len(ledger.failed_pairs) < nodes * (nodes - 1) // 2

    def _write_rest(self, ledger: Ledger, missing: Sequence[int], why: str, *, state: State = "failed") -> None:
        """Write rows of all that will not be measured, for these ranks have gone: it ends here."""
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
        """Wait for a value until then (monotonic seconds); errors as `Company.hear`, and `Leaving`."""
        while not self.company.comes(key, POLL_S):
            self._check_leaving()
            if time.monotonic() >= deadline:
                self.company.hear(key, 0.001)  # which says whom we waited for in vain
                return

    def _on_sigterm(self, *_: object) -> None:
        self._is_asked_to_end = True

    def _check_leaving(self) -> None:
        if self._is_asked_to_end:
            raise Leaving

    def _leave(self) -> NoReturn:
        """End as SIGTERM ends who does not listen to it; the leader looks first who has gone before it was asked."""
        with suppress(StartTimeoutError):
            self.company.say(f"leaving/{self.rank}", "")
            if self.ledger is not None:
                self.company.say(f"{self._number}/trouble", {"explained": True})  # for who has not been asked to end
                if missing := self._missing():
                    self._write_rest(self.ledger, missing, "its process has ended, or stands still")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("SIGTERM is not blocked")

    def _missing(self) -> list[int]:
        """List the ranks that neither leave nor have told how their player ended."""
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
        """Have a player play; return how it ended, after the others have been told of a failure."""
        trouble = f"{order.number}/trouble"
        player = Forked(lambda tell, page: play(self.company, self.settings, self.cells, order, tell, page))
        watch = Watch(self.settings.timeout_s)
        self._at = self._pair = None
        end_at = float("inf")

        def is_over() -> bool:
            nonlocal end_at
            self._check_leaving()
            now = time.monotonic()
            if end_at == float("inf") and self.company.has_been_said(trouble):
                end_at = now + (CAUSE_S if self.company.hear(trouble, ENDINGS_S)["explained"] else VICTIM_S)
            return now >= end_at or watch.is_stalled(player.page.beats, now, has_begun=self._at is not None)

        ended = player.followed(self._note, is_over, POLL_S)
        ending = Ending(rank=self.rank, cell=self._at, pair=self._pair, **asdict(ended))
        self._check_leaving()  # who is asked to end is so with its player: that is no failure
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
    """Notices a player that begins no call for longer than one may take."""

    def __init__(self, timeout_s: float) -> None:
        self.limit_s = timeout_s + STALL_MARGIN_S
        self.first_limit_s = max(LEAST_INIT_S, timeout_s) + STALL_MARGIN_S
        self._beats = -1
        self._since = time.monotonic()

    def is_stalled(self, beats: int, now: float, *, has_begun: bool) -> bool:
        """True when its last call is over its time; `now` in monotonic seconds."""
        if beats != self._beats:
            self._beats, self._since = beats, now
        return now - self._since > (self.limit_s if has_begun else self.first_limit_s)
